"""Stay with a running job until it is over: its log lines, its end, its exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from orchestrator.config.launch import View
from orchestrator.errors import EXIT_DONE, EXIT_STOPPED
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow import verdict
from orchestrator.head.follow.follower import NodeFollower, NodeLogs, open_logs
from orchestrator.head.follow.run import Run
from orchestrator.head.launch.launch import Launched
from orchestrator.head.screen.display import Display
from orchestrator.head.screen.keyboard import Keys
from orchestrator.head.screen.log_reader import LogFile, last_words
from orchestrator.head.screen.output import say, tell
from orchestrator.head.screen.screen import Screen
from orchestrator.head.status.backend import backend_of
from orchestrator.records.experiment import Experiment, JobRecord

SHORTEST = 4.0  # seconds of silence that a busy machine may need: it beats once a second at most


def follow_launched(launched: Launched, view: View, keys: Keys | None = None) -> int:
    """Follow a job from its start, over the channels that started it."""
    screen = make_screen(launched.experiment, launched.record, view)
    display, nodes = Display(screen), launched.nodes
    open_parts = [(n.channel, logs) for n, logs in zip(nodes.reached, launched.logs, strict=True)]
    return follow(launched.experiment, launched.record, nodes.transport, display, open_parts, keys)


def follow_again(
    experiment: Experiment,
    record: JobRecord,
    transport: Transport,
    view: View,
    keys: Keys | None = None,
) -> int:
    """Follow a job that runs already; lines that are here are not shown again."""
    screen = make_screen(experiment, record, view)
    screen.skip_to_end()
    display = Display(screen)
    open_parts = [(None, logs) for logs in open_logs(experiment, record.nodes)]
    return follow(experiment, record, transport, display, open_parts, keys)


def follow(
    experiment: Experiment,
    record: JobRecord,
    transport: Transport,
    display: Display,
    open_parts: Sequence[tuple[NodeChannel | None, NodeLogs]],
    keys: Keys | None,
) -> int:
    display.start()
    backend = backend_of(record)
    running = Run(experiment, record, display, backend)
    launch = record.launch
    followers = [
        NodeFollower(
            *(transport, record.job, node, experiment, running.post, channel),
            logs=logs,
            head=running.since,
            patience=max(SHORTEST, launch.node_loss_timeout)
            if launch.on_head_loss == "stop"
            else None,
        )
        for node, (channel, logs) in zip(record.nodes, open_parts, strict=True)
    ]
    try:
        running.go(followers, keys)
    finally:
        display.finish()
        experiment.unlock()
    if running.thief is not None:
        say(f"{head_name(running.thief)} has taken over; this head leaves, the job goes on")
        return EXIT_STOPPED  # not 0: what waits for this command must not take the job for done
    if running.end.left:
        say(f"left running; follow it again: orchestrator attach {experiment.name}")
        return EXIT_DONE
    if running.stopped_in_time and backend.start_again(experiment, running.record, say):
        return EXIT_STOPPED
    return tell_end(experiment, running.record)


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


def tell_end(experiment: Experiment, record: JobRecord) -> int:
    """Print how the job ended, and if it failed, the last lines of the rank that caused it."""
    assert record.ended is not None and record.exit_code is not None
    took = f"{record.ended - record.started:.1f} s"
    cause = record.verdict
    if cause is None or record.state == "stopped":
        say(f"{record.state} after {took}: {experiment.path}")
        return record.exit_code
    say(f"{record.state} after {took}; all logs are in {experiment.logs}")
    if cause["node"] is not None:
        node, rank = record.node(cause["node"]), cause["rank"]
        prefix = f"node{node.index} | " if rank is None else f"node{node.index} rank{rank} | "
        log = LogFile(node.index, node.name, experiment.log(node), experiment.ranks(node))
        lines = cause["traceback"].splitlines() or last_words(log, rank)
        tell("".join(f"{prefix}{line}\n" for line in lines))
    for line in verdict.to_lines(cause):
        say(line)
    return record.exit_code


def head_name(head: dict[str, Any]) -> str:
    return f"process {head['pid']} on {head['host']}"
