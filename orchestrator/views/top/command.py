"""`orchestrator top`: all nodes, who uses them, and how far each job is, live or once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial

from orchestrator.common import interrupt
from orchestrator.common.errors import EXIT_DONE, EXIT_NODE, OrchestratorError, UsageError
from orchestrator.common.text import plural
from orchestrator.config.launch import Where
from orchestrator.head.commands.machines.exec import OUTPUT_CLOSED
from orchestrator.head.commands.stop import end_job
from orchestrator.head.connect.reach import ask_node
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow.stop import receipts_to_text as to_words
from orchestrator.head.follow.streams.node_logs import log_files
from orchestrator.head.nodes.node_list import read_nodes
from orchestrator.head.screen import output
from orchestrator.head.screen import tracebacks as crash_dump
from orchestrator.head.screen.failures import failure_lines
from orchestrator.head.screen.log_reader import tail_lines, users_frames
from orchestrator.head.screen.output import Terminal
from orchestrator.head.status.status import FoundJob, transport_without_record
from orchestrator.protocol.requests.follow import AskStuck
from orchestrator.protocol.timing import SAMPLE_SECONDS
from orchestrator.records import experiments, manifest
from orchestrator.records.experiment import Experiment
from orchestrator.records.metrics.progress import RankProgress
from orchestrator.views.top import table
from orchestrator.views.top.sample import EVERY, JobSample, TopSample, Watch

# The lines of a log on the screen, of all nodes together.
LINES = 400
# The time between two samples when one job is shown.
SECONDS = 1.0
STACK_SECONDS = 15.0


def top(where: Where, *, once: bool, again: bool, seconds: float) -> int:
    if again and not output.as_json():
        raise UsageError("--watch needs --json", "without both, the screen is live by itself")
    transport = transport_without_record(where)
    nodes = read_nodes(where.node_list)
    watch = Watch(transport, nodes, where)
    with closing(watch):
        if output.as_json() or once or not can_be_live():
            watch.closer = EVERY if output.as_json() else ""
            return show(watch, every=seconds if again else None)
        return live(where, watch, seconds)


def can_be_live() -> bool:
    """Return True if the terminal can draw a screen."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def of_job(where: Where, found: FoundJob) -> None:
    """Show one job live until it is over or the user quits."""
    record = found.record
    watch = Watch(found.transport, record.nodes, where, record.job)
    with closing(watch):
        live(where, watch, SECONDS, alone=record.job)


def show(watch: Watch, *, every: float | None) -> int:
    """Print one sample; with --json --watch, print a line per sample until Ctrl-C."""
    watch.patience = None if every is None else SAMPLE_SECONDS
    while True:
        sample = watch.observe()
        indent = 1 if every is None else None
        written = output.print_result(
            table.sample_to_json(sample), partial(to_text, sample), indent=indent
        )
        if not written and every is not None:
            # The reader has closed the pipe, such as `| head -1`.
            return OUTPUT_CLOSED
        if every is None:
            lost = any(node.checkup is None for node in sample.nodes)
            return EXIT_NODE if lost else EXIT_DONE
        time.sleep(every)


def to_text(sample: TopSample, terminal: Terminal) -> str:
    nodes = table.NODES.text(sample.nodes, terminal)
    jobs = table.job_table(sample.time).text(sample.jobs, terminal)
    lost = failure_lines((node.name, node.problem, node.fix) for node in sample.nodes if node.fix)
    silent = sum(node.checkup is None for node in sample.nodes)
    unseen = f"; {plural(silent, 'node')} did not answer" if silent else ""
    none = f"no job is seen{unseen}" if unseen else "no job runs there"
    totals = table.totals_line(sample, terminal.width)
    parts = [totals, nodes, jobs if sample.jobs else none, "\n".join(lost)]
    return "\n\n".join(filter(None, parts))


def live(where: Where, watch: Watch, seconds: float, alone: str = "") -> int:
    # Imported here, as textual takes 0.2 s.
    from orchestrator.views.top.screen import Actions, Top

    actions = Actions(
        log=partial(open_log, where),
        stack=partial(stack_lines, where, watch.transport),
        stop=partial(end, where),
        over=partial(is_over, where),
    )

    def closer(job: str) -> None:
        watch.closer = job

    watch.patience = SAMPLE_SECONDS
    # Without this, a killed process leaves mouse reporting on and the cursor hidden.
    interrupt.undo_on_interrupt(output.terminal_restorer())
    Top(watch.observe, watch.seen(), seconds, actions, closer, alone).run()
    interrupt.undo_on_interrupt(None)
    return EXIT_DONE


def known(where: Where, job: JobSample) -> Experiment:
    found = experiments.find_experiment(where, job.experiment or job.job)
    if found is None:
        what = f"{job.job} was not started from {where.experiments}: its files are not here"
        raise UsageError(what, "--experiments names another directory")
    return found


def open_log(
    where: Where, job: JobSample, rank: RankProgress | None, node: str
) -> Callable[[], Sequence[str]]:
    """Return a function that reads the last lines of one rank, one node or all nodes."""
    found = known(where, job)
    nodes = [each for each in found.read_record().nodes if node in ("", each.name)]
    if rank is not None:
        nodes = [each for each in nodes if each.index == rank.index]
    logs = log_files(found, nodes)

    def lines() -> Sequence[str]:
        last: list[str] = []
        for log in logs:
            last += [f"--- node {log.node} ({log.label})"] * (len(logs) > 1)
            try:
                last += tail_lines(log, LINES // len(logs), None if rank is None else rank.rank)
            except OSError as error:
                last.append(f"{log.text.name} cannot be read: {error.strerror}")
        return last or ["nothing was printed yet"]

    return lines


def stack_lines(
    where: Where, transport: Transport, job: JobSample, rank: RankProgress
) -> Sequence[str]:
    """Return the stack of a rank, which a signal makes it write while it continues."""
    found = known(where, job)
    record = found.read_record()
    node = next(node for node in record.nodes if node.index == rank.index)
    question = AskStuck(job=record.job, part=node.part, attempt=record.attempt)
    stuck = ask_node(transport, node, question, STACK_SECONDS).stuck.get(rank.rank)
    if stuck is None or not stuck.stacks.strip():
        reason = "it does not run, it is no Python program, or it hangs in the kernel"
        return [f"rank {rank.rank} has not answered: {reason}"]
    return users_stack(stuck.stacks, manifest.working_tree(found))


def users_stack(stacks: str, tree: str) -> Sequence[str]:
    """Return the user's frames of each thread, the main thread first."""
    threads = crash_dump.own_paths_in_text(stacks, tree).strip().split("\n\n")
    lines: list[str] = []
    # faulthandler writes the main thread last.
    for thread in reversed(threads):
        # Threads with only frames of this program are left out.
        if len(frames := users_frames(thread.splitlines())) > 1:
            lines += [*frames, ""]
    return lines[:-1]


def is_over(where: Where, job: str) -> bool:
    """Return True if the record says that the job is over, even if a node of it is lost."""
    with suppress(OrchestratorError):
        found = experiments.find_experiment(where, job)
        return found is None or found.read_record().over
    return False


def end(where: Where, job: JobSample) -> str:
    """End a job as `orchestrator stop` does, and return its receipts as text."""
    ended = end_job(where, job.experiment or job.job, None)
    return f"{job.job} has ended already" if ended.receipts is None else to_words(ended.receipts)
