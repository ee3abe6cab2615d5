from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from orchestrator.head.follow.monitors import hang_monitor
from orchestrator.head.follow.monitors.hang_monitor import HangMonitor
from orchestrator.records.experiment import Experiment


@dataclass
class Clock:
    now: float = 100.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class SilentFollower:
    """The part of a follower that the monitor reads: a node that was heard of at time 100."""

    clock: Clock
    node: Any = None
    requests: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.node = self

    index = 0

    @property
    def silent(self) -> float:
        return self.clock.now - 100.0

    def ask(self, request: Any) -> None:
        self.requests.append(request)


@pytest.fixture
def follower(monkeypatch: pytest.MonkeyPatch) -> SilentFollower:
    clock = Clock()
    monkeypatch.setattr(hang_monitor, "time", clock)
    return SilentFollower(clock)


def watch(follower: SilentFollower, moments: list[float]) -> list[float]:
    """Look at these moments; return those at which the ranks were asked."""
    monitor = HangMonitor(2.0, Experiment(Path()), "job", print)
    asked = []
    for moment in moments:
        follower.clock.now, before = 100.0 + moment, len(follower.requests)
        monitor.check([follower])  # type: ignore[list-item]
        asked += [moment] * (len(follower.requests) - before)
    return asked


def test_silence_for_longer_than_the_timeout_is_looked_into(follower: SilentFollower) -> None:
    assert watch(follower, [tenth / 10 for tenth in range(1, 25)]) == [2.1]


def test_time_in_which_the_head_stood_still_is_no_silence(follower: SilentFollower) -> None:
    suspended = [0.1, 0.2, 5.0, 5.1, 6.0, 6.5, 7.0]
    assert watch(follower, suspended) == []
    assert watch(follower, [*suspended, 7.1]) == [7.1]
