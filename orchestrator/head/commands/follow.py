"""Stay with a running job until it is over: its log lines, its end, its exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from orchestrator.config.launch import View, Where
from orchestrator.errors import EXIT_DONE, EXIT_STOPPED
from orchestrator.head.commands import background
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow import verdict
from orchestrator.head.follow.follower import NodeFollower
from orchestrator.head.follow.node_logs import NodeLogs, open_logs
from orchestrator.head.follow.run import Run
from orchestrator.head.launch.launch import Launched
from orchestrator.head.screen import own_paths
from orchestrator.head.screen.display import Display
from orchestrator.head.screen.keyboard import Keys
from orchestrator.head.screen.log_reader import LogFile, last_words
from orchestrator.head.screen.output import say, tell
from orchestrator.head.screen.screen import Screen
from orchestrator.head.status.backend import backend_of
from orchestrator.records import manifest
from orchestrator.records.experiment import Experiment, JobRecord

SHORTEST = 4.0  # seconds of silence that a busy machine may need: it beats once a second at most
EXCERPT = 60  # lines


def follow_launched(
    launched: Launched, view: View, keys: Keys | None = None, where: Where | None = None
) -> int:
    """Follow a job from its start, over the channels that started it.

    With `where`, a head that leaves the job running leaves another one behind in the background.
    """
    experiment, record, nodes = launched.experiment, launched.record, launched.nodes
    screen = make_screen(experiment, record, view)
    running = Run(experiment, record, Display(screen), backend_of(record))
    followers = followers_of(
        running,
        nodes.transport,
        [node.channel for node in nodes.reached],
        launched.logs,
        head=running.since,
    )
    return follow(running, screen, followers, keys, where)


def follow_again(
    experiment: Experiment,
    record: JobRecord,
    transport: Transport,
    view: View,
    keys: Keys | None = None,
    where: Where | None = None,
    *,
    left_behind: bool = False,
    looks_on: bool = False,
) -> int:
    """Follow a job that runs already; lines that were shown are not shown again.

    One that only looks on is not missed by the job when it is gone.
    """
    screen = make_screen(experiment, record, view)
    screen.skip_to((None if view.quiet else experiment.take_shown()) or {})
    running = Run(experiment, record, Display(screen), backend_of(record), left_behind=left_behind)
    logs = open_logs(experiment, record.nodes)
    head = None if looks_on else running.since
    followers = followers_of(running, transport, [None] * len(logs), logs, head=head)
    return follow(running, screen, followers, keys, where)


def followers_of(
    running: Run,
    transport: Transport,
    channels: Sequence[NodeChannel | None],
    logs: Sequence[NodeLogs],
    *,
    head: float | None,
) -> list[NodeFollower]:
    record, launch = running.record, running.record.launch
    needed = head is not None and launch.on_head_loss == "stop"
    patience = max(SHORTEST, launch.node_loss_timeout) if needed else None
    return [
        NodeFollower(
            *(transport, record.job, node, running.experiment, running.post, channel),
            logs=opened,
            head=head,
            patience=patience,
        )
        for node, channel, opened in zip(record.nodes, channels, logs, strict=True)
    ]


def follow(
    running: Run,
    screen: Screen,
    followers: Sequence[NodeFollower],
    keys: Keys | None,
    where: Where | None,
) -> int:
    experiment, backend = running.experiment, backend_of(running.record)
    running.display.start()
    try:
        running.go(followers, keys)
    finally:
        running.display.finish()
        experiment.unlock()
    if running.thief is not None:
        say(f"{head_name(running.thief)} has taken over; this head leaves, the job goes on")
        return EXIT_STOPPED  # not 0: what waits for this command must not take the job for done
    if running.end.left:
        leave(running, screen, where)
        return EXIT_DONE
    if running.stopped_in_time and backend.start_again(experiment, running.record, say):
        return EXIT_STOPPED
    return tell_end(experiment, running.record, screen)


def leave(running: Run, screen: Screen, where: Where | None) -> None:
    """Leave a job running, and say who goes on writing its logs, if anybody does."""
    experiment, words = running.experiment, ""
    if where is not None and not running.record.head_elsewhere:
        if not screen.quiet:
            experiment.keep_shown(screen.positions)
        on_purpose = running.left_on_purpose
        words = f"; {background.leave_behind(experiment, where, on_purpose=on_purpose)}"
    say(f"left running{words}; follow it again: orchestrator attach {experiment.name}")


def show_unseen(experiment: Experiment, record: JobRecord, view: View) -> None:
    """Show the lines that came home after the user had left."""
    shown = None if view.quiet else experiment.take_shown()
    if shown is not None:
        screen = make_screen(experiment, record, view)
        screen.skip_to(shown)
        while screen.pump():
            pass
        screen.close()


def make_screen(experiment: Experiment, record: JobRecord, view: View) -> Screen:
    tty = sys.stdout.isatty()
    logs = log_files(experiment, record)
    return Screen(
        logs,
        sys.stdout,
        tty=tty,
        color=tty if view.color is None else view.color,
        quiet=view.quiet,
        node=view.node,
        rank=view.rank,
        ranks=sum(node.nproc for node in record.nodes),
    )


def log_files(experiment: Experiment, record: JobRecord) -> list[LogFile]:
    return [
        LogFile(node.index, node.name, experiment.log(node), experiment.ranks(node))
        for node in record.nodes
    ]


def tell_end(experiment: Experiment, record: JobRecord, screen: Screen | None = None) -> int:
    """Print how the job ended, and if it failed, the last lines of the rank that caused it.

    Lines that are still on the screen are not printed again, nor is their beginning.
    """
    assert record.ended is not None and record.exit_code is not None
    took = f"{record.ended - record.started:.1f} s"
    cause = record.verdict
    if cause is None or record.state == "stopped":
        say(f"{record.state} after {took}: {experiment.path}")
        return record.exit_code
    say(f"{record.state} after {took}; all logs are in {experiment.logs}")
    tree = manifest.working_tree(experiment)
    if cause["node"] is not None:
        node, rank = record.node(cause["node"]), cause["rank"]
        prefix = f"node{node.index} | " if rank is None else f"node{node.index} rank{rank} | "
        log = LogFile(node.index, node.name, experiment.log(node), experiment.ranks(node))
        lines = cause["traceback"].splitlines() or last_words(log, rank)
        shown = 0 if screen is None else screen.still_shows(lines, node.index, rank)
        lines = shortened([own_paths.in_text(line, tree) for line in lines[shown:]])
        tell("".join(f"{prefix}{line}\n" for line in lines))
    for line in verdict.to_lines(own_paths.in_verdict(cause, tree)):
        say(line)
    return record.exit_code


def shortened(lines: Sequence[str]) -> list[str]:
    """Leave out the middle of many lines: a message may be longer than any traceback."""
    left_out = len(lines) - EXCERPT
    if left_out <= 1:
        return list(lines)
    half = EXCERPT // 2
    return [*lines[:half], f"... ({left_out} lines are left out here)", *lines[-half:]]


def head_name(head: dict[str, Any]) -> str:
    return f"process {head['pid']} on {head['host']}"
