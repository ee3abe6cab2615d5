"""Stay with a running job until it is over: its log lines, its end, its exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestrator.common import files
from orchestrator.common.errors import EXIT_DONE, EXIT_STOPPED, OrchestratorError
from orchestrator.config.launch import View, Where
from orchestrator.head.background.process import Answers, Background, Pipe
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow import verdict
from orchestrator.head.follow.follower import NodeFollower
from orchestrator.head.follow.node_logs import NodeLogs, log_files, open_logs
from orchestrator.head.follow.notify.notifier import Notifier, notifier_of
from orchestrator.head.follow.run import Growth, Run
from orchestrator.head.screen import tracebacks as crash_dump
from orchestrator.head.screen.keyboard import Keys
from orchestrator.head.screen.log_reader import last_words
from orchestrator.head.screen.output import say, tell
from orchestrator.head.screen.screen import Display, Screen
from orchestrator.head.start.judge import judged
from orchestrator.head.start.launch import Launched
from orchestrator.head.status import status
from orchestrator.head.status.backend import backend_of
from orchestrator.head.status.find_job import adopt_job
from orchestrator.records import goodput, manifest
from orchestrator.records.experiment import Experiment, JobRecord, this_head

if TYPE_CHECKING:
    from orchestrator.head.start.attempt import Begun
    from orchestrator.head.start.grow import Latecomers

SHORTEST = 4.0  # seconds of silence that a busy machine may need: it beats once a second at most
EXCERPT = 60  # lines


def follow_launched(
    launched: Launched, view: View, keys: Keys | None = None, where: Where | None = None
) -> int:
    """Follow a job from its start, over the channels that started it.

    With `where`, a head that leaves the job running leaves another one behind in the background.
    """
    notifier = notifier_of(launched.experiment, launched.record, say)
    late = launched.latecomers
    stay = Stay(launched.experiment, notifier, view, keys, where, latecomers=late)
    screen = make_screen(launched.experiment, launched.record, view)
    nodes = launched.nodes
    channels = [node.channel for node in nodes.reached]
    return stay.go(launched.record, nodes.transport, channels, launched.logs, screen)


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
    notifier = notifier_of(experiment, record, say)
    stay = Stay(experiment, notifier, view, keys, where, left_behind, looks_on)
    if record.state == "restarting":  # its head was lost before it could
        following = stay.again(record, transport, {})
        if isinstance(following, JobRecord):
            experiment.unlock()
            return stay.tell_end(following)
        screen = make_screen(experiment, following.record, view)
        screen.skip_to({node.index: node.log_before for node in following.record.nodes})
        return stay.go(following.record, transport, following.channels, following.logs, screen)
    screen = make_screen(experiment, record, view)
    screen.skip_to((None if view.quiet else experiment.take_shown()) or {})
    logs = open_logs(experiment, record.nodes)
    return stay.go(record, transport, [None] * len(logs), logs, screen)


@dataclass(frozen=True)
class Stay:
    """One head's stay with a job, over all its attempts."""

    experiment: Experiment
    notifier: Notifier
    view: View
    keys: Keys | None
    where: Where | None
    left_behind: bool = False
    looks_on: bool = False
    latecomers: Latecomers | None = None  # of the head that has launched the job

    def go(
        self,
        record: JobRecord,
        transport: Transport,
        channels: Sequence[NodeChannel | None],
        logs: Sequence[NodeLogs],
        screen: Screen,
    ) -> int:
        """Follow an attempt, and those that come after it."""
        while True:
            running = self.run(record, screen, transport)
            head = None if self.looks_on else running.since
            followers = followers_of(running, transport, channels, logs, head=head)
            follow(running, followers, self.keys)
            if running.record.state != "restarting" or running.end.left:
                return self.end(running, screen, transport)
            self.notifier.over(running.record)
            following = self.again(running.record, transport, running.channels)
            if isinstance(following, JobRecord):
                return self.end(running, screen, transport, following)
            record, channels, logs = following.record, following.channels, following.logs
            self.notifier.report()
            screen = make_screen(self.experiment, record, self.view)
            screen.skip_to({node.index: node.log_before for node in record.nodes})

    def again(
        self, record: JobRecord, transport: Transport, channels: Mapping[int, NodeChannel]
    ) -> Begun | JobRecord:
        from orchestrator.head.start.attempt import again  # not for every job

        return again(self.experiment, record, transport, channels, say)

    def run(self, record: JobRecord, screen: Screen, transport: Transport) -> Run:
        display = Display(screen)
        return Run(
            self.experiment,
            record,
            display,
            backend_of(record),
            left_behind=self.left_behind,
            judge=judged if record.launch.max_restarts else None,
            straggler=self.notifier.straggler,
            growth=growth_of(record, transport, display, self.latecomers),
        )

    def end(
        self, running: Run, screen: Screen, transport: Transport, record: JobRecord | None = None
    ) -> int:
        """Say how the stay has ended, with the job or without."""
        experiment, record = self.experiment, record or running.record
        if record.over and running.channels:
            from orchestrator.head.start.release import release

            release(record, running.channels, transport)
        for channel in running.channels.values():
            channel.connection.close()
        experiment.unlock()
        if running.end.left:
            self.notifier.close()
        if running.thief is not None:
            say(f"{head_name(running.thief)} has taken over; this head ends, the job goes on")
            return EXIT_STOPPED  # not 0: what waits for this command must not take it for done
        if running.end.left:
            leave(running, screen, self.where)
            return EXIT_DONE
        backend = backend_of(record)
        if running.stopped_in_time and backend.start_again(experiment, record, say):
            return EXIT_STOPPED
        return self.tell_end(record, screen)

    def tell_end(self, record: JobRecord, screen: Screen | None = None) -> int:
        """Tell the end of the job here, and to whom else wants to know."""
        self.notifier.over(record)
        code = tell_end(self.experiment, record, screen)
        self.notifier.close()
        return code


def growth_of(
    record: JobRecord, transport: Transport, display: Display, latecomers: Latecomers | None
) -> Growth | None:
    """Return what looks for further nodes, for a job that may have more than it has."""
    if not record.launch.max_restarts:
        return None
    from orchestrator.head.start import grow

    if not grow.may_grow(record, latecomers):
        return None
    return grow.Growth(record, transport, display.say, latecomers)


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
            former_end=record.former_end,
        )
        for node, channel, opened in zip(record.nodes, channels, logs, strict=True)
    ]


def follow(running: Run, followers: Sequence[NodeFollower], keys: Keys | None) -> None:
    """Follow one attempt to its end, or until this head leaves."""
    running.display.start()
    try:
        running.go(followers, keys)
    except BaseException:
        running.experiment.unlock()
        raise
    finally:
        running.display.finish()


def leave(running: Run, screen: Screen, where: Where | None) -> None:
    """Leave a job running, and say who goes on writing its logs, if anybody does."""
    experiment, words = running.experiment, ""
    if where is not None and not running.record.head_elsewhere:
        if not screen.quiet:
            experiment.keep_shown(screen.positions)
        on_purpose = running.left_on_purpose
        words = f"; {leave_behind(experiment, where, on_purpose=on_purpose)}"
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
    logs = log_files(experiment, record.nodes)
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


def tell_end(experiment: Experiment, record: JobRecord, screen: Screen | None = None) -> int:
    """Print how the job ended, and if it failed, the last lines of the rank that caused it.

    Lines that are still on the screen are not printed again, nor is their beginning.
    """
    assert record.ended is not None and record.exit_code is not None
    took = f"{record.ended - record.started:.1f} s"
    cause = record.verdict
    if words := goodput.in_words({} if screen is None else record.goodput):
        say(f"time spent: {words}")
    if cause is None or record.state == "stopped":
        why = str(cause["message"]) if cause else ""
        by_user = why in (verdict.STOPPED_BY_USER, verdict.KILLED_BY_USER)  # who reads that knows
        why = "" if by_user else f" ({why})" * bool(why)
        say(f"{record.state} after {took}{why}: {experiment.path}")
        tell_attempts(record)
        return record.exit_code
    say(f"{record.state} after {took}; all logs are in {experiment.logs}")
    tell_attempts(record)
    tree = manifest.working_tree(experiment)
    if cause["node"] is not None and cause["node"] < len(record.nodes):
        node, rank = record.node(cause["node"]), cause["rank"]
        prefix = f"node{node.index} | " if rank is None else f"node{node.index} rank{rank} | "
        (log,) = log_files(experiment, [node])
        lines = cause["traceback"].splitlines() or last_words(log, rank)
        shown = 0 if screen is None else screen.still_shows(lines, node.index, rank)
        lines = shortened([crash_dump.in_text(line, tree) for line in lines[shown:]])
        tell("".join(f"{prefix}{line}\n" for line in lines))
    for line in verdict.to_lines(crash_dump.in_verdict(cause, tree)):
        say(line)
    return record.exit_code


def tell_attempts(record: JobRecord) -> None:
    """Say how the attempts of a job ended that was started again, or could have been."""
    for one in record.attempts[:-1]:
        at = "" if one.step is None else f" at step {one.step}"
        say(f"attempt {one.number} ended after {one.ended - one.started:.1f} s{at}: {one.why}")
    if record.attempts and record.state in ("failed", "lost"):
        last = record.attempts[-1]
        say(f"attempt {last.number} was the last: {last.why}")


def shortened(lines: Sequence[str]) -> list[str]:
    """Leave out the middle of many lines: a message may be longer than any traceback."""
    left_out = len(lines) - EXCERPT
    if left_out <= 1:
        return list(lines)
    half = EXCERPT // 2
    return [*lines[:half], f"... ({left_out} lines are left out here)", *lines[-half:]]


def head_name(head: dict[str, Any]) -> str:
    return f"process {head['pid']} on {head['host']}"


# -- in the background ------------------------------------------------------------------------


SILENT = View(quiet=True, color=False)


def leave_behind(experiment: Experiment, where: Where, *, on_purpose: bool) -> str:
    """Start a head that goes on in the background; describe what becomes of the logs."""
    which: dict[str, Any] = {"experiment": str(experiment.path), "where": absolute(where)}
    try:
        head = Background(take_up, **which, left_behind=True, on_purpose=on_purpose).answer()
    except (OrchestratorError, OSError) as error:
        return f"its logs stay on the nodes, for no head can go on in the background: {error}"
    return f"process {head['pid']} keeps writing its logs and its end here"


def absolute(where: Where) -> Where:
    return Where(
        nodes=where.nodes and where.nodes.absolute(),
        ssh_config=where.ssh_config and where.ssh_config.absolute(),
        experiments=where.experiments.absolute(),
        trust_record=where.trust_record,
    )


def take_up(
    answers: Answers,
    where: Where,
    experiment: str | None,
    left_behind: bool = False,
    on_purpose: bool = False,
) -> None:
    """Become the head of a job that has none, and say how much of its logs is yet to come.

    Whoever comes next takes over from it. Where another head left this one behind on purpose, the
    job does not depend on this one.
    """
    keys = Pipe()
    job = adopt_job(where, experiment)
    place = {"place": str(job.experiment.path), "pid": os.getpid()}
    elsewhere = job.record.over or job.record.head_elsewhere
    if elsewhere or job.experiment.lock(background=True) is not None:
        answers.tell(**place, logs={})
        return
    record = job.experiment.read_record()
    states = [] if record.over or left_behind else status.ask_nodes(job.transport, record)
    sizes = {node.index: state.log_bytes or 0 for node, state in zip(record.nodes, states)}  # noqa: B905
    speak_into(job.experiment)
    answers.tell(**place, logs=sizes)
    if not record.over:
        record = replace(record, head=this_head())
        follow_again(
            *(job.experiment, record, job.transport, SILENT, keys),
            where=None if left_behind else where,
            left_behind=left_behind,
            looks_on=on_purpose,
        )


def speak_into(experiment: Experiment) -> None:
    """Send what the head prints to a file: there is no terminal any more."""
    with contextlib.suppress(OSError):  # a full disk
        fd = files.open_to_append(experiment.path / "head.txt")
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        at = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(fd, f"orchestrator: {at}: process {os.getpid()} follows this job\n".encode())
        os.close(fd)
