"""What each command does between its options and its exit code. Called by cli.py alone."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator import config, experiment
from orchestrator.errors import UsageError
from orchestrator.experiment import Experiment, JobRecord
from orchestrator.head import launch as launching
from orchestrator.head import plan
from orchestrator.head.display import Display
from orchestrator.head.follow import Follower
from orchestrator.head.launch import Launched, Request
from orchestrator.head.logs import LogFile, tail
from orchestrator.head.plan import Target
from orchestrator.head.run import Run
from orchestrator.head.screen import Screen
from orchestrator.head.ssh import Ssh
from orchestrator.head.sshconfig import SshConfig

LAST_LINES = 20  # of a rank that left no traceback


def launch(options: dict[str, Any], *, default_config: str, default_hook: str) -> int:
    request = request_of(options, default_config, default_hook)
    if options["dry_run"]:
        return dry_run(request, as_json=options["as_json"])
    if options["as_json"]:
        raise UsageError("--json goes with --dry-run", "the running job is described in job.json")
    launched = launching.launch(request, say)
    if options["detach"]:
        return detach(launched)
    return follow(launched.experiment, launched.record, launched.ssh, options, launched)


def request_of(options: dict[str, Any], default_config: str, default_hook: str) -> Request:
    target = target_of(options["module"], options["program"])
    file = options["config_file"]
    if file is None and target.kind == "engine" and Path(default_config).is_file():
        file = Path(default_config)
    resolved = config.load(file, options["overrides"])
    names = (
        *("name", "nproc", "master_port", "start", "python", "workdir", "hook"),
        *("connect_timeout", "node_loss_timeout", "grace", "strict_host_keys"),
    )
    typed = {name: options[name] for name in names if options[name] is not None}
    chosen = replace(resolved.launch, **typed)
    if chosen.hook is None and Path(default_hook).is_file():
        chosen = replace(chosen, hook=default_hook)
    import os

    return Request(
        nodes=options["nodes"],
        ssh_config=options["ssh_config"],
        experiments=options["experiments"],
        config=replace(resolved, launch=chosen),
        target=target,
        env=launching.user_env(options["env"], os.environ),
        command=tuple(sys.argv),
        config_file=file,
    )


def target_of(module: str | None, program: tuple[str, ...]) -> Target:
    if module is not None:
        return Target("module", module, program)
    if program:
        return Target("auto", program[0], program[1:])
    return Target("engine", plan.ENGINE, ())


def dry_run(request: Request, *, as_json: bool) -> int:
    _, reached, spares = launching.prepare(request)
    name = f"{request.config.launch.name}_dry-run"
    where = str(request.experiments.absolute() / name)
    made = launching.make_plan(request, reached, spares, name, where)
    print_out(json.dumps(plan.to_json(made), indent=1) if as_json else plan.to_text(made))
    return 0


def detach(launched: Launched) -> int:
    say(f"{launched.record.job} runs on {len(launched.record.nodes)} nodes")
    say(f"take it up again: orchestrator attach {launched.experiment.name}")
    return 0


# -- following --------------------------------------------------------------------------------


def follow(
    place: Experiment,
    record: JobRecord,
    ssh: Ssh,
    options: dict[str, Any],
    launched: Launched | None = None,
) -> int:
    """Stay with a job until it is over, or the user leaves it; its exit code."""
    files = log_files(place, record)
    display = Display(make_screen(files, record, options))
    if launched is None:
        display.screen.skip_to_end()
    display.start()
    running = Run(
        place, record, display, grace=record.grace, node_loss_timeout=record.node_loss_timeout
    )
    links = [one.link for one in launched.reached] if launched else [None] * len(record.nodes)
    followers = [
        Follower(ssh, record.job, node, place, running.inbox.put, link)
        for node, link in zip(record.nodes, links, strict=True)
    ]
    running.go(followers)
    display.finish()
    place.unlock()
    if running.detached:
        say(f"left running; take it up again: orchestrator attach {place.name}")
        return 0
    return tell_end(place, running.record)


def make_screen(files: list[LogFile], record: JobRecord, options: dict[str, Any]) -> Screen:
    tty = sys.stdout.isatty()
    color = options["color"] if options.get("color") is not None else tty
    return Screen(
        files,
        sys.stdout,
        tty=tty,
        color=color,
        quiet=options.get("quiet", False),
        node=options.get("node"),
        rank=options.get("rank"),
        ranks=sum(node.nproc for node in record.nodes),
    )


def log_files(place: Experiment, record: JobRecord) -> list[LogFile]:
    return [
        LogFile(node.index, node.name, place.log(node), place.ranks(node)) for node in record.nodes
    ]


def tell_end(place: Experiment, record: JobRecord) -> int:
    """The last lines on the screen: what came of it, and if it failed, the cause's own words."""
    assert record.ended is not None and record.exit_code is not None
    took = f"{record.ended - record.started:.1f} s"
    cause = record.verdict
    if cause is None:
        say(f"{record.state} after {took}: {place.path}")
        return record.exit_code
    node = record.nodes[cause["node"]]
    rank = cause["rank"]
    who = f"node {node.index} ({node.name})"
    who = who if rank is None else f"rank {rank} on {who}"
    others = f"; {cause['others']} more failed after it" if cause["others"] else ""
    say(f"{record.state} after {took}{others}; all logs are in {place.logs}")
    first = cause["message"].splitlines()[0]
    say(f"the cause: {who}: {first}" + (f", at {cause['where']}" if cause["where"] else ""))
    prefix = f"node{node.index} | " if rank is None else f"node{node.index} rank{rank} | "
    log = LogFile(node.index, node.name, place.log(node), place.ranks(node))
    lines = cause["traceback"].splitlines() or tail(log, LAST_LINES, rank)
    print_out("".join(f"{prefix}{line}\n" for line in lines))
    return record.exit_code


def attach(options: dict[str, Any]) -> int:
    place = experiment.find(options["experiments"], options["experiment"])
    record = place.read_record()
    if record.over:
        return tell_end(place, record)
    holder = place.lock()
    if holder is not None:
        raise UsageError(
            f"{place.name} is followed by process {holder['pid']} on {holder['host']} since "
            + time.strftime("%H:%M:%S", time.localtime(holder["since"])),
            f"look on: orchestrator logs -f {place.name}",
        )
    say(f"{place.name}: {len(record.nodes)} nodes")
    return follow(place, record, ssh_of(options, record), options)


def ssh_of(options: dict[str, Any], record: JobRecord) -> Ssh:
    file = options["ssh_config"] or (Path(record.ssh_config) if record.ssh_config else None)
    return Ssh(SshConfig(file), strict=record.strict_host_keys)


def say(text: str) -> None:
    print_out(f"orchestrator: {text}\n")


def print_out(text: str) -> None:
    """To standard output, even a Latin-1 one; a reader that has left is not an error of the job."""
    try:
        sys.stdout.write(text if text.endswith("\n") or not text else text + "\n")
        sys.stdout.flush()
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding or "ascii"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    except BrokenPipeError:
        pass
