"""What each command does between its options and its exit code. Called by cli.py alone."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.config import load
from orchestrator.errors import (
    EXIT_DONE,
    EXIT_NODE,
    EXIT_STOPPED,
    UsageError,
    nearest,
)
from orchestrator.head.connect.ssh import SshTransport
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.connect.subprocess_transport import Allocation, LocalTransport, SrunTransport
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow import stop as stopping
from orchestrator.head.follow import verdict
from orchestrator.head.follow.follower import NodeFollower
from orchestrator.head.follow.run import Run
from orchestrator.head.inventory.node_list import read_nodes
from orchestrator.head.launch import launch as launching
from orchestrator.head.launch.launch import Launched
from orchestrator.head.launch.request import Request, prepare
from orchestrator.head.plan import accelerate, dry_run, explain, plan
from orchestrator.head.plan.model import Target
from orchestrator.head.screen.display import Display
from orchestrator.head.screen.log_reader import LogFile, last_words
from orchestrator.head.screen.screen import Screen
from orchestrator.head.slurm import batch_job, queue
from orchestrator.head.status import status as job_status
from orchestrator.head.status.catch_up import LogFetcher
from orchestrator.records import experiment
from orchestrator.records.experiment import Experiment, JobRecord

STEAL_SECONDS = 15.0  # for the head that is there to leave


def launch(
    options: dict[str, Any],
    *,
    default_config: str,
    default_hook: str,
    allocation: Allocation | None = None,
) -> int:
    request = request_of(options, default_config, default_hook)
    request = replace(request, allocation=allocation)
    if options["dry_run"]:
        return show_plan(request, as_json=options["as_json"])
    if options["as_json"]:
        raise UsageError("--json goes with --dry-run", "the running job is described in job.json")
    launched = launching.launch(request, say)
    if options["detach"]:
        return detach(launched)
    return follow(launched.experiment, launched.record, launched.ssh, options, launched)


def plan_only(options: dict[str, Any], *, default_config: str, default_hook: str) -> int:
    options = {**options, "detach": False}
    request = request_of(options, default_config, default_hook)
    return show_plan(request, as_json=options["as_json"], why=options["explain"])


def request_of(options: dict[str, Any], default_config: str, default_hook: str) -> Request:
    target = target_of(options["module"], options["program"])
    file = options["config_file"]
    if file is None and target.kind == "engine" and Path(default_config).is_file():
        file = Path(default_config)
    resolved = load.load(file, options["overrides"])
    names = (
        *("name", "nproc", "master_port", "start", "python", "workdir", "hook"),
        *("connect_timeout", "node_loss_timeout", "on_node_loss", "on_head_loss"),
        *("hang_timeout", "on_hang"),
        *("grace", "strict_host_keys", "check"),
    )
    typed = {name: options[name] for name in names if options[name] is not None}
    chosen = replace(resolved.launch, **typed)
    by = accelerate.asked(options.get("launcher"), options.get("accelerate_config"), target.kind)
    if by is not None:
        chosen = accelerate.settle(chosen, by)
    if chosen.hook is None and Path(default_hook).is_file():
        chosen = replace(chosen, hook=default_hook)
    return Request(
        nodes=options["nodes"],
        ssh_config=options["ssh_config"],
        experiments=options["experiments"],
        config=replace(resolved, launch=chosen),
        target=target,
        env=launching.user_env(options["env"], os.environ),
        command=tuple(sys.argv),
        config_file=file,
        detached=options["detach"],
        accelerate=by,
    )


def target_of(module: str | None, program: tuple[str, ...]) -> Target:
    if module is not None:
        return Target("module", module, program)
    if program:
        return Target("auto", program[0], program[1:])
    return Target("engine", plan.ENGINE, ())


def show_plan(request: Request, *, as_json: bool, why: bool = False) -> int:
    _, reached, spares = prepare(request)
    name = f"{request.config.launch.name}_dry-run"
    where = str(request.experiments.absolute() / name)
    made = launching.make_plan(request, reached, spares, name, where)
    if as_json:
        print_out(json.dumps(dry_run.to_json(made), indent=1))
    else:
        print_out(explain.to_text(made) if why else dry_run.to_text(made))
    return 0


def detach(launched: Launched) -> int:
    say(f"{launched.record.job} runs on {len(launched.record.nodes)} nodes")
    say(f"take it up again: orchestrator attach {launched.experiment.name}")
    return 0


# -- following --------------------------------------------------------------------------------


def follow(
    place: Experiment,
    record: JobRecord,
    ssh: Transport,
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
    channels = [one.channel for one in launched.reached] if launched else [None] * len(record.nodes)
    followers = [
        NodeFollower(ssh, record.job, node, place, running.post, channel, head=running.since)
        for node, channel in zip(record.nodes, channels, strict=True)
    ]
    running.go(followers, options.get("keys"))
    display.finish()
    place.unlock()
    if running.thief is not None:
        say(f"{whose(running.thief)} has taken over; this head leaves, the job goes on")
        return EXIT_STOPPED  # not 0: what waits for this command must not take the job for done
    if running.end.left:
        say(f"left running; take it up again: orchestrator attach {place.name}")
        return 0
    in_time = running.out_of_time and running.record.state == "stopped"
    if in_time and batch_job.again_later(place, running.record, say):
        return EXIT_STOPPED
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
    if cause is None or record.state == "stopped":
        say(f"{record.state} after {took}: {place.path}")
        return record.exit_code
    say(f"{record.state} after {took}; all logs are in {place.logs}")
    if cause["node"] is not None:
        node, rank = record.node(cause["node"]), cause["rank"]
        prefix = f"node{node.index} | " if rank is None else f"node{node.index} rank{rank} | "
        log = LogFile(node.index, node.name, place.log(node), place.ranks(node))
        lines = cause["traceback"].splitlines() or last_words(log, rank)
        print_out("".join(f"{prefix}{line}\n" for line in lines))
    for line in verdict.to_lines(cause):
        say(line)
    return record.exit_code


# -- a job that runs or ran -------------------------------------------------------------------


def locate(options: dict[str, Any]) -> tuple[Experiment | None, JobRecord, Transport]:
    """A job by its experiment here, or else by what the nodes of the list know of it."""
    wanted = options["experiment"]
    place = experiment.find(options["experiments"], wanted)
    if place is not None:
        record = batch_job.settle(place, place.read_record())
        if record.slurm_job is not None:
            return place, record, SrunTransport(record.slurm_job)
        if record.part_of:
            return place, record, LocalTransport()
        file = options["ssh_config"] or (Path(record.ssh_config) if record.ssh_config else None)
        return place, record, SshTransport(SshConfig(file), strict=record.strict_host_keys)
    if not options["nodes"].exists():
        names = [one.name for one in experiment.every(options["experiments"])]
        hint = nearest(wanted, names) if wanted else "; start one: master_launch SCRIPT"
        what = f"no experiment {wanted!r}" if wanted else "no experiment"
        raise UsageError(f"there is {what} in {options['experiments']}{hint}")
    ssh = SshTransport(SshConfig(options["ssh_config"]))
    return None, job_status.find_on_nodes(ssh, read_nodes(options["nodes"]), wanted), ssh


def at_home(options: dict[str, Any]) -> tuple[Experiment, JobRecord, Transport]:
    """The same, with a directory here for the logs to come home to."""
    place, record, ssh = locate(options)
    if place is None:
        place = experiment.adopt(options["experiments"], record)
        say(f"{place.name} was started elsewhere; its logs come to {place.logs}")
        record = place.read_record()
    return place, record, ssh


def attach(options: dict[str, Any]) -> int:
    place, record, ssh = at_home(options)
    if record.over:
        return tell_end(place, record)
    if record.batch:
        return watch(place, record)
    holder = place.steal(STEAL_SECONDS) if options["steal"] else place.lock()
    if holder is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        still = f" and did not leave within {STEAL_SECONDS:.0f} s" if options["steal"] else ""
        raise UsageError(
            f"{place.name} is followed by {whose(holder)}, since {since}{still}",
            f"end that process (kill -9 {holder['pid']} there); the job goes on"
            if options["steal"]
            else f"take it over: orchestrator attach --steal {place.name}; "
            f"look on: orchestrator logs -f {place.name}",
        )
    record = place.read_record()  # the one who left may have seen more of it
    if record.over:
        place.unlock()
        return tell_end(place, record)
    say(f"{place.name}: {len(record.nodes)} nodes; d leaves it running, Ctrl-C stops it")
    return follow(place, replace(record, head=experiment.this_head()), ssh, options)


def watch(place: Experiment, record: JobRecord, *, anew: bool = False) -> int:
    """A job whose head is Slurm's: what that prints, until the job is over or left alone."""
    watching = batch_job.Watch(place, record, say, anew=anew)
    say(f"{place.name} is Slurm's job {record.slurm_job}; d leaves it, Ctrl-C stops it")
    if not watching.go():
        say(f"left running; take it up again: orchestrator attach {place.name}")
        return EXIT_DONE
    if watching.settled:
        return tell_end(place, watching.record)
    assert watching.record.exit_code is not None
    return watching.record.exit_code


def whose(head: dict[str, Any]) -> str:
    return f"process {head['pid']} on {head['host']}"


def logs(options: dict[str, Any]) -> int:
    place, record, ssh = at_home(options)
    if record.state == "queued":
        say(f"{place.name} waits in Slurm's queue: {queue.place(batch_job.job_of(record))}")
        record = batch_job.begun(place, record) if options["follow"] else record
    check_choice(record, options["node"], options["rank"])
    files = log_files(place, record)
    screen = make_screen(files, record, options)
    fetcher = LogFetcher(place, record, ssh)
    over = not options["follow"]
    if over:
        fetcher.catch_up()
    else:
        fetcher.begin()
    while screen.pump() or not (over or screen.broken):
        over = over or fetcher.over(wait=0.2)
    screen.close()
    fetcher.end()
    return EXIT_DONE


def check_choice(record: JobRecord, node: int | None, rank: int | None) -> None:
    world = sum(one.nproc for one in record.nodes)
    if node is not None and node not in [one.index for one in record.nodes]:
        raise UsageError(f"--node {node}: this job has nodes 0 to {len(record.nodes) - 1}")
    if rank is not None and not 0 <= rank < world:
        raise UsageError(f"--rank {rank}: this job has ranks 0 to {world - 1}")


def status(options: dict[str, Any]) -> int:
    place, record, ssh = locate(options)
    while True:
        asleep = record.over or record.state == "queued"
        states = job_status.from_record(record) if asleep else job_status.ask_nodes(ssh, record)
        words = job_status.to_json if options["as_json"] else job_status.to_text
        if options["watch"] and sys.stdout.isatty():
            sys.stdout.write("\x1b[H\x1b[J")
        slurm = queue.place(record.slurm_job) if record.slurm_job and not record.over else None
        print_out(words(record, states, slurm))
        over = record.over or (
            record.state != "queued" and all(state.state == "ended" for state in states)
        )
        if over or not options["watch"]:
            unreachable = any(state.state == "unreachable" for state in states)
            return EXIT_NODE if unreachable else EXIT_DONE
        time.sleep(1)
        record = batch_job.settle(place, place.read_record()) if place else record


def stop(options: dict[str, Any]) -> int:
    place, record, found = end_job(options)
    if found is None:
        over = f"orchestrator: {record.job} is over already ({record.state})"
        print_out("[]" if options["as_json"] else over)
        return EXIT_DONE
    code = show_receipts(found, as_json=options["as_json"])
    why = stopping.conclude(place, found) if place is not None else ""
    if why:
        sys.stderr.write(f"orchestrator: these receipts are not in job.json: {why}\n")
    return code


def end_job(
    options: dict[str, Any],
) -> tuple[Experiment | None, JobRecord, list[stopping.Receipt] | None]:
    """End a job on its nodes: where its record is to be concluded, the record, the receipts.

    No receipts: there is nothing to end.
    """
    place, record, ssh = locate(options)
    grace = 0.0 if options["now"] else options["grace"]
    grace = record.grace if grace is None else grace
    if place is not None and record.batch and not record.over:
        return None, record, batch_job.stop(place, record, grace)
    # Of a job that is over, those nodes that could not be told so.
    nodes = [node for node in record.nodes if not record.over or node.state == "lost"]
    found = stopping.stop_job(ssh, record, nodes, grace) if nodes else None
    return place, record, found


def emergency_stop(options: dict[str, Any]) -> int:
    ssh = SshTransport(SshConfig(options["ssh_config"]))
    found = stopping.stop_everything(
        ssh, read_nodes(options["nodes"]), all_users=not options["mine"]
    )
    return show_receipts(found, as_json=options["as_json"])


def show_receipts(found: list[stopping.Receipt], *, as_json: bool) -> int:
    text = json.dumps(stopping.to_json(found), indent=1) if as_json else stopping.to_text(found)
    print_out(text)
    return stopping.exit_code(found)


# -- words ------------------------------------------------------------------------------------


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
