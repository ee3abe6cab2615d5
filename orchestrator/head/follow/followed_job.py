"""Keeps what a head knows of a job that it follows: its record, its nodes, and its end."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from orchestrator.head.follow import verdict
from orchestrator.head.follow.job_end import JobEnd, Outcome
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.head.follow.verdict import Failure
from orchestrator.head.screen.output import OURS
from orchestrator.head.screen.screen import Display
from orchestrator.head.screen.styles import FAILED, WARNING, styled
from orchestrator.protocol.events import (
    Ended,
    Event,
    FirstOutput,
    RankEvent,
    RankSlow,
    RankStarted,
    RankState,
    Started,
    TorchReady,
)
from orchestrator.protocol.facts import Xid
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord
from orchestrator.records.outcome import SlowRank

log = logging.getLogger(__name__)

SAVE_SECONDS = 0.25  # between two records

START: dict[type[Event], str] = {
    Started: "supervisor",
    TorchReady: "torch",
    FirstOutput: "output",
}


@dataclass
class NodeState:
    """One node's part of the job."""

    record: NodeRecord
    over: bool = False
    grace: float = 0.0  # that its ranks have to save, once its end has begun
    asked_at: float = 0.0  # by its own clock, when that was
    ended: Ended | None = None  # the supervisor's last event
    lost_since: float = 0.0  # monotonic; 0: connected
    lost_why: str = ""
    silent: float = 0.0  # seconds for which it had said nothing when the connection was lost
    given_up: bool = False
    clock: float = 0.0  # the node's clock minus ours
    ranks: dict[int, RankState] = field(default_factory=dict)  # as job.json has them
    times: dict[str, float] = field(default_factory=dict)  # of its start, as job.json has them
    broken_gpu: Xid | None = None  # that its driver told of first

    @property
    def who(self) -> str:
        return f"node {self.record.index} ({self.record.name})"

    @property
    def away(self) -> float:
        """Return for how many seconds there has been no connection."""
        return time.monotonic() - self.lost_since if self.lost_since else 0.0

    @property
    def unheard(self) -> float:
        """Return for how many seconds a node that is away has said nothing."""
        return self.away + self.silent if self.lost_since else 0.0

    def failure(self, when: float, kind: str, message: str, rank: int | None = None) -> Failure:
        return Failure(self.record.index, self.record.name, rank, when, kind, message)

    def notes(self, event: Event) -> bool:
        """Note what an event says of a rank; return False if it is not of this node, or no news."""
        if not isinstance(event, RankEvent) or isinstance(event, RankSlow):
            return True
        before = self.ranks.get(event.rank, RankState())
        ended = before.state in ("ended", event.event.removeprefix("rank_"))
        if ended or event.rank not in self.record.numbers:
            return False
        self.ranks[event.rank] = before.after(event)
        return True

    def note_time(self, event: Event) -> None:
        """Note when a step of the start was done, by our clock: of the ranks, the last one's."""
        when = event.time - self.clock
        if isinstance(event, RankStarted):
            self.times["ranks"] = max(when, self.times.get("ranks", when))
        elif type(event) in START:
            self.times.setdefault(START[type(event)], when)

    def close(self) -> None:
        """Note that nothing more will come from it."""
        self.over, self.lost_since = True, 0.0
        code = self.ended.agent if self.ended else None
        self.record = replace(self.record, state="ended", exit_code=code, ranks=self.ranks)
        self.record = replace(self.record, times=self.times)


class FollowedJob:
    """A job that this head follows. One thread changes it; followers only send news."""

    def __init__(
        self,
        experiment: Experiment,
        record: JobRecord,
        display: Display,
    ) -> None:
        self.experiment, self.record, self.display = experiment, record, display
        self.nodes = [NodeState(node, times=dict(node.times)) for node in record.nodes]
        self.followers: Sequence[NodeFollower] = ()  # one for each node
        self.end = JobEnd()
        self.failures: list[Failure] = []
        self.changed = True  # and not written yet
        self.save_next_at = 0.0  # monotonic
        self.disk_is_full = False

    def say(self, text: str) -> None:
        log.debug("says: %s", text)
        self.display.say(f"{OURS} {text}")

    def warn(self, text: str) -> None:
        """Say what the user may have to act on."""
        self.say(styled(text, WARNING))

    @property
    def at_work(self) -> list[NodeFollower]:
        """Return the followers of the nodes whose part is not over."""
        return [f for f, node in zip(self.followers, self.nodes, strict=True) if not node.over]

    # -- its end -----------------------------------------------------------------------------

    def failed(self, failure: Failure) -> None:
        self.failures.append(failure)
        what = verdict.first_line(failure.message)
        log.info("%s: %s (%s)", failure.who, failure.kind, what)
        if self.end.open:
            self.end.fail(f"{failure.who} failed", time.monotonic(), certain=failure.certain)
            what = f"it lost the others ({what[:100]})" if failure.echo else what
            self.announce_end(f"{failure.who}: {what}")

    def give_up_on(self, loss: Failure) -> None:
        log.info("%s: given up: %s", loss.who, loss.message)
        self.end.outcome = Outcome.LOST
        self.failures.append(loss)
        self.announce_end(f"{loss.who}: {loss.message}")
        self.end_all(f"node {loss.node} was lost", self.record.launch.grace)

    def announce_end(self, why: str) -> None:
        self.display.mute()
        self.say(f"{styled(why, FAILED)}; ending the job everywhere")

    def end_all(self, reason: str, grace: float) -> None:
        log.info("all nodes are to end: %s; grace %g s", reason, grace)
        self.end.ordered(grace, time.monotonic())
        failed = self.end.outcome in (Outcome.FAILED, Outcome.LOST)
        for follower in self.at_work:
            follower.end(reason, grace, failed=failed)

    # -- its machines ------------------------------------------------------------------------

    def held_up(self, slow: SlowRank) -> None:
        """Note who holds the others up. A new head hears it all once more."""
        if slow not in self.record.slow:
            self.record = replace(self.record, slow=[*self.record.slow, slow])
            self.changed = True

    # -- the record --------------------------------------------------------------------------

    def current_record(self) -> JobRecord:
        nodes = [replace(n.record, ranks=n.ranks, times=n.times) for n in self.nodes]
        running = self.record.state == "starting" and all(n.state != "starting" for n in nodes)
        return replace(self.record, nodes=nodes, state="running" if running else self.record.state)

    def save_in_turn(self, *, at_once: bool) -> None:
        """Write what has changed, once in a while or at once."""
        if self.changed and (at_once or time.monotonic() >= self.save_next_at):
            self.save()
            self.save_next_at = time.monotonic() + SAVE_SECONDS

    def save(self) -> None:
        self.record, self.changed = self.current_record(), False
        try:
            self.experiment.write_record(self.record)
            self.disk_is_full = False
        except OSError as error:
            self.changed = True  # again at the next turn
            self.disk_full(error)

    def disk_full(self, error: OSError | None = None) -> None:
        if self.disk_is_full:
            return
        self.disk_is_full = True
        log.info("the record cannot be written: %s", error)
        if error is not None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            self.warn(f"{self.experiment.path} cannot be written: {error.strerror}")
        else:
            self.warn(f"no space left for {self.experiment.path}: the logs wait on the nodes")
