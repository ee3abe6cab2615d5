"""`master_launch` and `orchestrator plan`: start a job, or print what it would be."""

from __future__ import annotations

import sys
from pathlib import Path

from orchestrator.common import interrupt
from orchestrator.common.errors import EXIT_DONE, UsageError
from orchestrator.common.text import plural
from orchestrator.config.launch import LaunchArguments, Where
from orchestrator.head.screen import output
from orchestrator.head.screen.events import say
from orchestrator.head.screen.keyboard import KEYS, in_foreground
from orchestrator.head.start import launch as starting
from orchestrator.head.start.record import Running
from orchestrator.head.start.request import resolve_request


def launch(arguments: LaunchArguments) -> int:
    """Start a job and follow it, unless it is only to be shown, or to be left running."""
    if arguments.dry_run:
        return show_plan(arguments, explained=False)
    if output.as_json():
        raise UsageError("--json needs --dry-run", "the running job is described in job.json")
    request = resolve_request(arguments)
    if (request.config.launch.queue or request.config.launch.after) and arguments.detach:
        return wait_in_background(arguments)
    return follow_or_detach(starting.launch(request), arguments)


def wait_in_background(arguments: LaunchArguments) -> int:
    """Leave a launch to a process that waits in the queue and follows the job then."""
    from orchestrator.head.background.process import Background
    from orchestrator.head.commands import launching

    command = list(sys.argv)
    head = Background(launching.launch, arguments=arguments, command=command)
    answer = head.answer(say)
    if "place" in answer:
        say(f"follow it: orchestrator attach {Path(answer['place']).name}")
    else:
        say(
            f"background process {answer['queued']} waits, and follows the job then; `kill` ends"
            " it, `orchestrator nodes --queue` shows it, `orchestrator ls` once it runs"
        )
    head.hang_up()
    return EXIT_DONE


def follow_or_detach(running: Running, arguments: LaunchArguments) -> int:
    """Follow a job that was just started, or leave it running."""
    # Imported while the ranks rendezvous, which starts them 40 ms earlier.
    from orchestrator.head.commands import follow

    if arguments.detach and not interrupt.end_is_wanted():
        return detach(running, arguments.where)
    # On a terminal, the progress line names the keys.
    if in_foreground() and not sys.stdout.isatty():
        say(KEYS)
    return follow.follow_launched(running, arguments.view, where=arguments.where)


def detach(running: Running, where: Where) -> int:
    """Leave a job that has just been started to a head in the background."""
    from orchestrator.head.commands import follow

    experiment, record = running.experiment, running.record
    for channel in filter(None, running.channels):
        channel.connection.close()
    experiment.keep_shown(dict.fromkeys((node.index for node in record.nodes), 0))
    experiment.unlock()
    words = f"{record.job} runs on {plural(len(record.nodes), 'node')}"
    if not record.head_elsewhere:
        words += f"; {follow.leave_to_background(experiment, where, on_purpose=True)}"
    say(words)
    say(f"follow it again: orchestrator attach {experiment.name}")
    return EXIT_DONE


def show_plan(arguments: LaunchArguments, *, explained: bool) -> int:
    """Print what a launch would run, or where each of its settings comes from; start nothing."""
    from orchestrator.head.plan import dry_run, redact

    planned = redact.redact_plan(starting.rehearse_launch(resolve_request(arguments)))
    show = dry_run.explain_plan if explained else dry_run.plan_to_text
    output.print_result(dry_run.plan_to_json(planned), lambda _: show(planned))
    return EXIT_DONE
