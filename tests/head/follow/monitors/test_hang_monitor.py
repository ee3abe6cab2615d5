from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from orchestrator.head.follow.monitors import hang_monitor, watcher
from orchestrator.head.follow.monitors.hang_monitor import HangMonitor
from orchestrator.protocol.requests.follow import RankStacks, Stuck
from orchestrator.records.experiment import Experiment


@dataclass
class Clock:
    now: float = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@dataclass
class SilentFollower:
    """The part of a follower that the monitor reads: a node that was heard of at time 100."""

    clock: Clock
    node: Any = None
    requests: list[Any] = field(default_factory=list)
    idle_at_most: float = 1e9
    nproc: int = 1

    def __post_init__(self) -> None:
        self.node = self

    index = 0
    name = "node"
    numbers = range(4)

    @property
    def silent(self) -> float:
        return self.clock.now - 100.0

    @property
    def idle(self) -> float:
        return min(self.silent, self.idle_at_most)

    def ask(self, request: Any) -> None:
        self.requests.append(request)


@pytest.fixture
def follower(monkeypatch: pytest.MonkeyPatch) -> SilentFollower:
    clock = Clock()
    monkeypatch.setattr(hang_monitor, "time", clock)
    monkeypatch.setattr(watcher, "time", clock)
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


STACKS = """Current thread 0x00007f0000000000 (most recent call first):
  File "/project/data.py", line 88 in read
  File "/project/train.py", line 5 in <module>
"""


def test_a_node_tells_nothing_of_the_clocks_and_ranks_of_others(
    follower: SilentFollower, tmp_path: Path
) -> None:
    """One that is in the year 5138 makes no wait of another's older; busy ranks do not hang."""
    follower.idle_at_most = 0.0
    liar = SilentFollower(follower.clock, idle_at_most=0.0)
    follower.numbers, liar.index, liar.numbers = range(1), 1, range(1, 2)  # type: ignore[misc]
    monitor = HangMonitor(600.0, Experiment(tmp_path), "job", print)
    followers: Any = [follower, liar]

    def ask(of_liar: dict[int, RankStacks], since: int) -> Any:
        entry = {"profiling_name": "nccl:all_reduce", "process_group": ["0"], "state": "scheduled",
                 "collective_seq_id": 7, "time_created_ns": since}  # fmt: skip
        collectives = json.dumps({"entries": [entry]})
        stacks = RankStacks(state="R", stacks="", collectives=collectives)
        follower.requests.clear()
        while not follower.requests:
            follower.clock.now += 1.0
            monitor.check(followers)
        monitor.answer(0, Stuck(stuck={0: stacks}, time=2e9))
        monitor.answer(1, Stuck(stuck=of_liar, time=99_999_999_999.0))
        return monitor.check(followers)

    theirs = RankStacks(state="R", stacks="", collectives="")
    assert ask({0: theirs, 1: theirs, 1 << 99: theirs}, 1_999_999_999 * 10**9) is None
    found = ask({0: theirs, 1: theirs}, 1_999_999_000 * 10**9)
    assert found is not None and found.kind == "hang"
    kept = sorted(path.name for path in (tmp_path / "hang").iterdir() if "stacks" in path.name)
    assert kept == ["node_0_rank_0_stacks.txt", "node_1_rank_1_stacks.txt"]
