"""Follow a running job to its end: handle the nodes' reports, the user's keys and signals.

Launch and attach both use it. It runs in one thread; followers and signals post to its queue.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import time
from collections.abc import Sequence
from functools import cached_property, singledispatchmethod
from typing import TYPE_CHECKING, Protocol

from orchestrator.common import interrupt
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.events import of_job
from orchestrator.head.follow import conclusion, verdict
from orchestrator.head.follow.followed_job import FollowedJob
from orchestrator.head.follow.job_end import Outcome
from orchestrator.head.follow.monitors.hang import HangMonitor
from orchestrator.head.follow.monitors.watchers import DIALS_WITHIN_SECONDS, StartMonitor
from orchestrator.head.follow.reports import Reports
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.head.follow.streams.updates import Answer, Grew, NodeUpdate
from orchestrator.head.screen.events import tell
from orchestrator.head.screen.keyboard import KEYS, Keyboard
from orchestrator.head.screen.screen import Display
from orchestrator.head.transfer import home
from orchestrator.protocol.requests.follow import Stuck
from orchestrator.protocol.timing import CUT_OFF_SECONDS
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.outcome import Head, SlowRank

if TYPE_CHECKING:
    from orchestrator.head.follow.monitors.slow_gpus import SlowMonitor

log = logging.getLogger(__name__)

# The pause between two checks if another head wants to take over.
SUCCESSOR_SECONDS = 0.5
# The most time between the ends of the ranks and the same signal to their head.
SAME_SIGNAL_SECONDS = 1.0
# The beginning of a job says nothing about its pace.
FIRST_PACE_SECONDS = 30.0


class Backend(Protocol):
    """The properties of a job's scheduler that matter while the job is followed."""

    @property
    def signals(self) -> Sequence[int]:
        """Return the signals that ask the head to end the job, or to leave it (SIGHUP)."""

    @property
    def has_other_heads(self) -> bool:
        """Return True if other nodes of the job have heads of their own."""

    def is_taken_back(self, record: JobRecord) -> bool:
        """Return True if the scheduler ends the job in order to start it again."""

    def why_terminated(self, record: JobRecord) -> str:
        """Return why the scheduler ends the job, if it does so by itself."""


class Run:
    """Follows a job: `go()` returns when it is over or the head leaves; `record` is its state."""

    def __init__(
        self,
        experiment: Experiment,
        record: JobRecord,
        display: Display,
        backend: Backend,
        *,
        left_behind: bool = False,
    ) -> None:
        self.job = FollowedJob(experiment, record, display)
        self.reports = Reports(self.job, has_other_heads=backend.has_other_heads)
        self.monitors = Monitors(self.job)
        self.experiment, self.end, self.backend = experiment, self.job.end, backend
        # The channels that are still open when the job is over, by node index.
        self.channels: dict[int, NodeChannel] = {}
        self.inbox: queue.SimpleQueue[NodeUpdate | int] = queue.SimpleQueue()
        # True in a background process that a head started when it left.
        self.left_behind = left_behind
        self.left_on_purpose = False
        self.interrupts = 0
        # True after SIGTERM, which Slurm also sends, perhaps to requeue the job.
        self.terminated = False
        self.taken_back = False
        # True if the job stops at Slurm's time limit; Slurm may then start it again.
        self.out_of_time = False
        # The head that takes over.
        self.successor: Head | None = None
        self.successor_sought_at = 0.0

    @property
    def record(self) -> JobRecord:
        return self.job.record

    # -- the loop ----------------------------------------------------------------------------

    def go(self, followers: Sequence[NodeFollower], typed: Keyboard | None = None) -> None:
        self.job.followers = followers
        before = {number: signal.getsignal(number) for number in self.backend.signals}
        for number in before:
            signal.signal(number, lambda signum, _: self.inbox.put(signum))
        for held in interrupt.release_interrupts():
            self.inbox.put(held)
        try:
            with typed or Keyboard() as keys:
                log.info("follows %d nodes of job %s", len(followers), self.record.job)
                for follower in followers:
                    follower.start()
                while not self.end.left and not all(n.over or n.given_up for n in self.job.nodes):
                    self.turn(keys)
                self.await_signal()
            self.channels = self.open_channels()
        finally:
            # The job is over. Interrupts are held until its record is written.
            interrupt.hold_interrupts()
            for number, handler in before.items():
                signal.signal(number, handler)
            for follower in followers:
                follower.close()
        if not self.end.left:
            outputs = self.experiment.path / "outputs"
            for line in home.where_files_are(self.reports.code_outputs, outputs):
                tell(of_job.FilesAreHome(line))
            self.conclude()

    def turn(self, keys: Keyboard) -> None:
        with contextlib.suppress(queue.Empty):
            self.take(self.inbox.get(timeout=0.1))
            # All queued messages are handled in one turn.
            for _ in range(self.inbox.qsize()):
                self.take(self.inbox.get_nowait())
        pressed = keys.pressed()
        if "d" in pressed:
            log.info("leaves the job running, as the user wants")
            self.end.left = self.left_on_purpose = True
        elif "h" in pressed or "?" in pressed:
            tell(of_job.KeysShown(KEYS))
        self.check_successor()
        if self.end.order_is_due(time.monotonic()):
            self.job.end_all(self.end.order_why, self.record.launch.grace)
        self.check_patience()
        self.monitors.check()
        self.job.save_in_turn(at_once=not self.end.open or self.end.left)

    def post(self, updates: NodeUpdate) -> None:
        """Queue an update from a follower's thread; growth of a log goes to the screen directly."""
        if isinstance(updates, Grew):
            self.job.display.grew()
        else:
            self.inbox.put(updates)

    @singledispatchmethod
    def take(self, message: NodeUpdate | int) -> None:
        """Handle the update of a node, the answer to a monitor, or the number of a signal."""
        assert isinstance(message, NodeUpdate)
        self.reports.handle(message)

    @take.register(Answer)
    def _(self, message: Answer) -> None:
        self.monitors.answer(message)

    @take.register(int)
    def _(self, message: int) -> None:
        self.signalled(message)

    # -- signals -----------------------------------------------------------------------------

    def signalled(self, number: int) -> None:
        log.info("signal %s, while the end is %s", number, self.end.outcome.value)
        if number == signal.SIGHUP or self.left_behind:
            # A hangup or a shutdown of this machine is not meant for the job.
            self.end.left = True
            return
        self.interrupts += 1
        self.terminated = self.terminated or number == signal.SIGTERM
        if number == signal.SIGTERM and self.ranks_were_terminated():
            self.end.outcome = Outcome.STOPPED
            tell(of_job.SignalShared())
            self.job.end_all(verdict.STOPPED_BY_USER, self.record.launch.grace)
            return
        self.out_of_time = number == signal.SIGUSR1 and self.end.open
        if self.out_of_time:
            tell(of_job.TimeIsShort())
        if self.interrupts == 1 and self.end.open:
            self.end.outcome = Outcome.STOPPED
            grace = self.record.launch.grace
            tell(of_job.StopAsked(grace))
            self.job.end_all(verdict.STOPPED_BY_USER, grace)
        else:
            # Without this outcome a job with restarts would be started again.
            if self.end.open or self.record.launch.max_restarts:
                self.end.outcome = Outcome.STOPPED
            tell(of_job.KillAsked())
            self.job.end_all(verdict.KILLED_BY_USER, 0.0)

    def ranks_were_terminated(self) -> bool:
        """Return True if all causes of the job's failure are ranks ended by SIGTERM.

        scancel sends SIGTERM to ranks and head, in any order.
        """
        causes = [f for f in self.job.failures if not f.echo and f.kind != "ended_early"]
        return (
            self.end.outcome is Outcome.FAILED
            and bool(causes)
            and all(failure.terminated for failure in causes)
        )

    def await_signal(self) -> None:
        """Wait a moment for the signal that ended the ranks, which may reach this head as well."""
        deadline = time.monotonic() + SAME_SIGNAL_SECONDS
        while self.ranks_were_terminated() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                message = self.inbox.get(timeout=max(0.0, deadline - time.monotonic()))
                if isinstance(message, int):
                    self.signalled(message)

    # -- lost nodes, other heads, the end ----------------------------------------------------

    def check_patience(self) -> None:
        """Mark nodes as given up that are lost, or that do not confirm their end in time."""
        if self.left_behind and self.is_cut_off():
            return
        now, limit = time.monotonic(), self.record.launch.node_loss_timeout
        if self.job.disk_is_full and self.end.gives_up(now):
            # The nodes have the logs and the result; a head that has room for them takes them.
            self.end.left = True
            return
        for node in self.job.nodes:
            away = node.away
            reason = f"no connection for {away:.0f} s ({node.lost_why})"
            # The loss counts from the last contact, which is before its effects on other nodes.
            loss = node.failure(time.time() - away, "lost", reason)
            if self.end.open and away > limit:
                self.job.give_up_on(loss)
            too_long = not self.end.open and node.unheard > limit
            if node.given_up or node.over or not (too_long or self.end.gives_up(now)):
                continue
            node.given_up = True
            log.info("%s is given up: away for %.1f s, %s", node.who, away, node.lost_why)
            if away and self.end.outcome is not Outcome.LOST:
                self.job.failures.append(loss)

    def is_cut_off(self) -> bool:
        """Return True if no node can be reached, so this machine is cut off rather than the job.

        The head leaves after a long time; `attach` finds out what happened to the job.
        """
        away = [node.away for node in self.job.nodes if not node.over]
        if not all(away) or not self.end.open:
            return False
        if min(away, default=0.0) > max(CUT_OFF_SECONDS, self.record.launch.node_loss_timeout):
            tell(of_job.NoNodeReached(min(away)))
            self.end.left = True
        return True

    def check_successor(self) -> None:
        if time.monotonic() > self.successor_sought_at + SUCCESSOR_SECONDS:
            self.successor_sought_at = time.monotonic()
            self.successor = self.experiment.successor()
            if self.successor is not None:
                log.info("another head wants to follow the job: %s", self.successor)
            self.end.left = self.end.left or self.successor is not None

    def open_channels(self) -> dict[int, NodeChannel]:
        """Return the channels to nodes that have ended; {} if there can be no next attempt."""
        if not self.record.launch.max_restarts or self.end.left:
            return {}
        channels = {
            follower.node.index: follower.give_channel()
            for follower, node in zip(self.job.followers, self.job.nodes, strict=True)
            # The follower of a node that was given up may still wait for a connection.
            if node.over
        }
        return {index: channel for index, channel in channels.items() if channel is not None}

    @property
    def stopped_in_time(self) -> bool:
        """Return True if Slurm wanted the nodes back, and the ranks saved to go on later."""
        return (self.out_of_time or self.taken_back) and self.record.state == "stopped"

    def conclude(self) -> None:
        self.job.record = conclusion.conclude_attempt(
            self.job,
            self.backend.why_terminated if self.terminated else lambda _: "",
            stopped=bool(self.interrupts),
        )
        cause, goes_on = self.record.verdict, self.record.goes_on
        log.info("the attempt is over: %s; %s", self.record.state, cause and cause.message)
        if self.terminated and self.record.state == "stopped":
            self.taken_back = self.backend.is_taken_back(self.record)
        if not (self.record.engine or goes_on or all(node.shared for node in self.record.nodes)):
            tell(of_job.FilesStay())
        # A job that can be requeued is not recorded as ended: readers would stop following it.
        if not self.stopped_in_time:
            self.job.save()


class Monitors:
    """The monitors of a job; they work while all nodes are connected and the job is not ending."""

    def __init__(self, job: FollowedJob) -> None:
        self.job, record = job, job.record
        limit = record.launch.hang_timeout
        self.hang = HangMonitor(limit, job.experiment, record)
        # With a short limit the hang monitor finds the problem first, as the user requested.
        self.start = StartMonitor("" if 0 < limit < DIALS_WITHIN_SECONDS else record.master)
        self.slow_from = time.monotonic() + FIRST_PACE_SECONDS

    @cached_property
    def slow(self) -> SlowMonitor:
        # A short job does not need it.
        from orchestrator.head.follow.monitors.slow_gpus import SlowMonitor

        outputs = self.job.experiment.path / "outputs"
        return SlowMonitor(self.job.record.nodes, outputs, self.held_up)

    def held_up(self, slow: SlowRank) -> None:
        self.job.held_up(slow.replace(time=time.time()))
        tell(of_job.RankIsSlow(slow.text))

    def answer(self, updates: Answer) -> None:
        """Pass an answer to the monitor that sent the request."""
        monitor = self.hang if isinstance(updates.answer, Stuck) else self.start
        monitor.answers[updates.node] = updates.answer

    def check(self) -> None:
        job = self.job
        if not job.end.open or any(node.lost_since for node in job.nodes):
            return
        begun = any(node.ranks for node in job.nodes)
        failure = self.start.check(job.at_work, begun=begun)
        if failure is None:
            if time.monotonic() > self.slow_from:
                self.slow.check()
            failure = self.hang.check(job.at_work)
        if failure is not None:
            job.failed(failure)
