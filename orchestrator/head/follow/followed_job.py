"""The state of a job that this head follows: its record, its nodes, and its end."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.head.events import of_job
from orchestrator.head.follow import verdict
from orchestrator.head.follow.job_end import JobEnd, Outcome
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.head.follow.verdict import Failure
from orchestrator.head.screen.events import tell
from orchestrator.head.screen.screen import Display
from orchestrator.protocol.events import (
    Ended,
    Event,
    FirstOutput,
    RankEvent,
    RankSlow,
    RankStacks,
    RankStarted,
    RankState,
    Started,
    TorchReady,
)
from orchestrator.protocol.facts import Xid
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord
from orchestrator.records.outcome import SlowRank

log = logging.getLogger(__name__)

# The least time between two writes of the record.
SAVE_SECONDS = 0.25
# The most characters that are shown of an error which follows from another.
LONGEST_ECHO = 100

START: dict[type[Event], str] = {
    Started: "supervisor",
    TorchReady: "torch",
    FirstOutput: "output",
}


@dataclass
class NodeState:
    """The state of one node of the job."""

    record: NodeRecord
    over: bool = False
    # The seconds that the ranks have to save, once the end has begun.
    grace: float = 0.0
    # The time at which that end began.
    asked_at: float = 0.0
    # The last event of the supervisor.
    ended: Ended | None = None
    # Monotonic time; 0 while the node is connected.
    lost_since: float = 0.0
    lost_why: str = ""
    # The seconds of silence before the connection was lost.
    silent: float = 0.0
    given_up: bool = False
    # The states of the ranks, as in job.json.
    ranks: dict[int, RankState] = field(default_factory=dict)
    # The times of the steps of the start, as in job.json.
    times: dict[str, float] = field(default_factory=dict)
    # The first error that the driver reported.
    broken_gpu: Xid | None = None
    # The positions of ranks for which another had waited in vain.
    stuck: Mapping[int, RankStacks] = field(default_factory=dict)

    @property
    def who(self) -> str:
        return f"node {self.record.index} ({self.record.name})"

    @property
    def away(self) -> float:
        """Return the seconds since the connection was lost, 0 while connected."""
        return time.monotonic() - self.lost_since if self.lost_since else 0.0

    @property
    def unheard(self) -> float:
        """Return the seconds since a disconnected node was last heard, 0 while connected."""
        return self.away + self.silent if self.lost_since else 0.0

    def failure(self, when: float, kind: str, message: str, rank: int | None = None) -> Failure:
        return Failure(self.record.index, self.record.name, rank, when, kind, message)

    def notes(self, event: Event) -> bool:
        """Update a rank's state from an event; return False if the rank is foreign or has ended."""
        if not isinstance(event, RankEvent) or isinstance(event, RankSlow):
            return True
        before = self.ranks.get(event.rank, RankState())
        ended = before.state in ("ended", event.event.removeprefix("rank_"))
        if ended or event.rank not in self.record.numbers:
            return False
        self.ranks[event.rank] = before.after(event)
        return True

    def note_time(self, event: Event) -> None:
        """Store the time of a step of the start; of ranks, the latest."""
        if isinstance(event, RankStarted):
            self.times["ranks"] = max(event.time, self.times.get("ranks", event.time))
        elif type(event) in START:
            self.times.setdefault(START[type(event)], event.time)

    def close(self) -> None:
        """Mark the node as over: no more events will come from it."""
        self.over, self.lost_since = True, 0.0
        code = self.ended.agent if self.ended else None
        self.record = replace(self.record, state="ended", exit_code=code, ranks=self.ranks)
        self.record = replace(self.record, times=self.times)


class FollowedJob:
    """A job that this head follows. Only one thread changes it; followers send it updates."""

    def __init__(
        self,
        experiment: Experiment,
        record: JobRecord,
        display: Display,
    ) -> None:
        self.experiment, self.record, self.display = experiment, record, display
        self.nodes = [NodeState(node, times=dict(node.times)) for node in record.nodes]
        # There is one follower for each node.
        self.followers: Sequence[NodeFollower] = ()
        self.end = JobEnd()
        self.failures: list[Failure] = []
        # True if there are changes that are not written yet.
        self.changed = True
        # By the monotonic clock.
        self.save_next_at = 0.0
        self.disk_is_full = False

    @property
    def at_work(self) -> list[NodeFollower]:
        """Return the followers of the nodes that are not over."""
        return [f for f, node in zip(self.followers, self.nodes, strict=True) if not node.over]

    # -- its end -----------------------------------------------------------------------------

    def failed(self, failure: Failure) -> None:
        self.failures.append(failure)
        what = verdict.first_line(failure.message)
        log.info("%s: %s (%s)", failure.who, failure.kind, what)
        if self.end.open:
            self.end.fail(f"{failure.who} failed", time.monotonic(), certain=failure.certain)
            short = what if len(what) <= LONGEST_ECHO else f"{what[: LONGEST_ECHO - 1]}…"
            what = f"it lost the others ({short})" if failure.echo else what
            self.announce_end(f"{failure.who}: {what}")

    def give_up_on(self, loss: Failure) -> None:
        self.end.outcome = Outcome.LOST
        self.failures.append(loss)
        self.announce_end(f"{loss.who}: {loss.message}")
        self.end_all(f"node {loss.node} was lost", self.record.launch.grace)

    def announce_end(self, why: str) -> None:
        self.display.mute()
        last = self.record.attempt > self.record.launch.max_restarts
        tell(of_job.EndBegins(why, "the job" if last else "this attempt"))

    def end_all(self, reason: str, grace: float) -> None:
        log.info("all nodes are to end: %s; grace %g s", reason, grace)
        self.end.ordered(grace, time.monotonic())
        failed = self.end.outcome in (Outcome.FAILED, Outcome.LOST)
        for follower in self.at_work:
            follower.end(reason, grace, failed=failed)

    # -- its machines ------------------------------------------------------------------------

    def held_up(self, slow: SlowRank) -> None:
        """Add a slow rank to the record; a new head receives the same events again."""
        if slow.replace(time=None) not in [one.replace(time=None) for one in self.record.slow]:
            self.record = replace(self.record, slow=[*self.record.slow, slow])
            self.changed = True

    # -- the record --------------------------------------------------------------------------

    def current_record(self) -> JobRecord:
        nodes = [replace(n.record, ranks=n.ranks, times=n.times) for n in self.nodes]
        running = self.record.state == "starting" and all(n.state != "starting" for n in nodes)
        return replace(self.record, nodes=nodes, state="running" if running else self.record.state)

    def save_in_turn(self, *, at_once: bool) -> None:
        """Write the record if it has changed and the last write is SAVE_SECONDS ago, or at once."""
        if self.changed and (at_once or time.monotonic() >= self.save_next_at):
            self.save()
            self.save_next_at = time.monotonic() + SAVE_SECONDS

    def save(self) -> None:
        self.record, self.changed = self.current_record(), False
        try:
            self.experiment.write_record(self.record)
            self.disk_is_full = False
        except OSError as error:
            # The write is tried again at the next turn.
            self.changed = True
            self.disk_full(error)

    def disk_full(self, error: OSError | None = None) -> None:
        if self.disk_is_full:
            return
        self.disk_is_full = True
        if error is not None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            tell(of_job.FileUnwritable(str(self.experiment.path), str(error.strerror)))
        else:
            tell(of_job.DiskIsFull(str(self.experiment.path)))
