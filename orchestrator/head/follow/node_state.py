"""Keeps what a head knows of one node's part of the job."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from orchestrator.protocol.events import (
    Ended,
    Event,
    FirstOutput,
    RankEvent,
    RankStarted,
    RankState,
    Started,
    TorchReady,
)
from orchestrator.records.experiment import NodeRecord

START: dict[type[Event], str] = {
    Started: "supervisor",
    TorchReady: "torch",
    FirstOutput: "output",
}


@dataclass
class NodeState:
    record: NodeRecord
    over: bool = False
    grace: float = 0.0  # that its ranks have to save, once its end has begun
    asked_at: float = 0.0  # by its own clock, when that was
    ended: Ended | None = None  # the supervisor's last event
    lost_since: float = 0.0  # monotonic; 0: connected
    lost_why: str = ""
    outside_since: float = 0.0  # monotonic: its machine answers, its container is not to be entered
    silent: float = 0.0  # seconds for which it had said nothing when the connection was lost
    given_up: bool = False
    awaited: float = 0.0  # seconds of waiting that the user was last told about
    clock: float = 0.0  # the node's clock minus ours
    ranks: dict[int, RankState] = field(default_factory=dict)  # as job.json has them
    times: dict[str, float] = field(default_factory=dict)  # of its start, as job.json has them

    @property
    def who(self) -> str:
        return f"node {self.record.index} ({self.record.name})"

    @property
    def away(self) -> float:
        """Return for how many seconds there has been no connection."""
        return time.monotonic() - self.lost_since if self.lost_since else 0.0

    @property
    def outside(self) -> float:
        """Return for how many seconds its container could not be entered."""
        return time.monotonic() - self.outside_since if self.outside_since else 0.0

    @property
    def unheard(self) -> float:
        """Return for how many seconds a node that is away has said nothing."""
        return self.away + self.silent if self.lost_since else 0.0

    def take(self, event: RankEvent) -> None:
        """Note what the event says of its rank."""
        self.ranks[event.rank] = self.ranks.get(event.rank, RankState()).after(event)

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
