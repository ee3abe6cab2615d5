"""When a job is said to hang, and which rank is named."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.head.follow.monitors import hang, watchers
from orchestrator.head.follow.monitors.hang import (
    HangMonitor,
    StuckRank,
    describe_hang,
    find_culprit,
    fix_of_hang,
    oldest_wait,
    stuck_rank,
)
from orchestrator.protocol.requests.follow import RankStacks, Stuck
from orchestrator.records.experiment import Experiment, JobRecord

RECORD = JobRecord("job", "run", "running", ["x"], [], 1000.0)


@dataclass
class Clock:
    now: float = 100.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


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

    index = part = 0
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
    monkeypatch.setattr(hang, "time", clock)
    monkeypatch.setattr(watchers, "time", clock)
    return SilentFollower(clock)


def watch(follower: SilentFollower, moments: list[float]) -> list[float]:
    """Look at these moments; return those at which the ranks were asked."""
    monitor = HangMonitor(2.0, Experiment(Path()), RECORD)
    asked = []
    for moment in moments:
        follower.clock.now, before = 100.0 + moment, len(follower.requests)
        monitor.check([follower])  # type: ignore[list-item]
        asked += [moment] * (len(follower.requests) - before)
    return asked


def test_watch_asks_ranks_after_timeout_of_silence(follower: SilentFollower) -> None:
    assert watch(follower, [tenth / 10 for tenth in range(1, 25)]) == [2.1]


def test_watch_ignores_time_head_was_suspended(follower: SilentFollower) -> None:
    suspended = [0.1, 0.2, 5.0, 5.1, 6.0, 6.5, 7.0]
    assert watch(follower, suspended) == []
    assert watch(follower, [*suspended, 7.1]) == [7.1]


def test_report_trusts_each_node_for_its_own_ranks_alone(
    follower: SilentFollower, tmp_path: Path
) -> None:
    """One that is in the year 5138 makes no wait of another's older; busy ranks do not hang."""
    follower.idle_at_most = 0.0
    liar = SilentFollower(follower.clock, idle_at_most=0.0)
    follower.numbers, liar.index, liar.numbers = range(1), 1, range(1, 2)  # type: ignore[misc]
    monitor = HangMonitor(600.0, Experiment(tmp_path), RECORD)
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
        monitor.answers[0] = Stuck(stuck={0: stacks}, time=2e9)
        monitor.answers[1] = Stuck(stuck=of_liar, time=99_999_999_999.0)
        return monitor.check(followers)

    theirs = RankStacks(state="R", stacks="", collectives="")
    assert ask({0: theirs, 1: theirs, 1 << 99: theirs}, 1_999_999_999 * 10**9) is None
    found = ask({0: theirs, 1: theirs}, 1_999_999_000 * 10**9)
    assert found is not None and found.kind == "hang"
    kept = sorted(path.name for path in (tmp_path / "hang").iterdir() if "stacks" in path.name)
    assert kept == ["node_0_rank_0_stacks.txt", "node_1_rank_1_stacks.txt"]


STACKS = """Thread 0x00007f01 (most recent call first):
  File "/x/orchestrator/node/job/ranks/rank.py", line 190 in tell_collectives

Current thread 0x00007f02 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d.py", line 2 in all_reduce
  File "/home/me/my data.py", line 88 in read
  File "/home/me/train.py", line 3 in <module>
"""


def entry(number: int, name: str, *, retired: bool, group: str = "0") -> dict[str, object]:
    return {
        **{"collective_seq_id": number, "profiling_name": f"gloo:{name}", "retired": retired},
        **{"process_group": [group, "default_pg"], "is_p2p": False, "state": "scheduled"},
        "time_created_ns": 1_000_000_000 * number,
    }


def test_of_rank_reads_stack_and_collectives() -> None:
    entries = [entry(1, "all_reduce", retired=True), entry(2, "barrier", retired=False)]
    entries += [entry(7, "broadcast", retired=True, group="1")]
    dump = json.dumps({"entries": entries})
    told = RankStacks(state="S", stacks=STACKS, collectives=dump)
    found = stuck_rank(3, 1, told)
    assert found.where == "/home/me/my data.py:88 read()"
    assert found.waits == {("0", "gloo"): (2, "barrier", 2.0)}
    assert found.entered == {("0", "gloo"): 2, ("1", "gloo"): 7}
    assert oldest_wait(found, 602.0) == 600.0


def test_of_rank_counts_each_backend_separately() -> None:
    nccl = {"profiling_name": "nccl:all_reduce"}
    entries = [entry(1, "barrier", retired=False), entry(900, "broadcast", retired=True)]
    entries += [{**entry(412, "", retired=False), **nccl, "state": "completed"}]
    entries += [{**entry(number, "", retired=False), **nccl} for number in (413, 414)]
    dump = json.dumps({"entries": entries})
    found = stuck_rank(0, 0, RankStacks(state="R", stacks=STACKS, collectives=dump))
    assert found.waits == {("0", "nccl"): (413, "all_reduce", 413.0)}
    assert found.entered == {("0", "gloo"): 900, ("0", "nccl"): 414}
    words = "it never entered all_reduce #413; it is in f.py:1 g()"
    assert describe_hang([found, rank(1, entered=412)]) == words


def test_of_rank_ignores_parts_of_coalesced_collective() -> None:
    nccl = {"profiling_name": "nccl:_reduce_scatter_base"}
    parts = [{**entry(7, "", retired=False), **nccl} for _ in range(3)]
    whole = {**entry(7, "", retired=True), "profiling_name": "nccl:reduce_scatter_tensor_coalesced"}
    for entries, waits in (([*parts, whole], 0), ([*parts, whole, *parts], 1)):
        dump = json.dumps({"entries": entries})
        found = stuck_rank(0, 0, RankStacks(state="R", stacks="", collectives=dump))
        assert len(found.waits) == waits


def test_reading_merges_same_line_of_node_copies() -> None:
    ranks = [replace(rank(n), where=f"/node{n}/code/train.py:7 nap()") for n in (0, 1)]
    assert describe_hang(ranks) == "all ranks are at the same place: /node0/code/train.py:7 nap()"
    assert (
        "what that line waits for" in fix_of_hang(ranks) and fix_of_hang([rank(0), rank(1)]) == ""
    )


def test_reading_names_program_that_is_not_python() -> None:
    answer = RankStacks(state="S", stacks="", collectives="", program="the program sleep")
    ranks = [stuck_rank(number, 0, answer) for number in (0, 1)]
    assert describe_hang(ranks) == "all ranks are at the same place: the program sleep"
    unknown = [replace(each, where="") for each in ranks]
    assert describe_hang(unknown) == "no rank makes progress; rank 0: its position is unknown"


ENTRY = '{"entries": [{"profiling_name": "n:a", "process_group": ["0"], "collective_seq_id": %s}]}'
HUGE = [ENTRY % "Infinity", ENTRY % f'1, "time_created_ns": 1{"0" * 400}']


@pytest.mark.parametrize("text", ["", "{", "[]", '{"entries": 5}', "null", *HUGE])
def test_of_rank_ignores_malformed_answer(text: str) -> None:
    found = stuck_rank(0, 0, RankStacks(state="S", stacks=text, collectives=text))
    assert (found.where, found.waits, found.entered) == ("", {}, {})


def rank(
    number: int, waits: str = "", entered: int = 0, state: str = "S", **groups: int
) -> StuckRank:
    """waits: "all_reduce #7", or "all_reduce #7 of G"."""
    where = f"f.py:{number} g()"
    words = waits.split()
    group = (words[3] if len(words) > 2 else "0", "nccl")
    inside = {group: (int(words[1][1:]), words[0], 0.0)} if words else {}
    last = {group: inside[group][0]} if words else {("0", "nccl"): entered}
    others = {(name, "nccl"): number for name, number in groups.items()}
    return StuckRank(number, number // 2, state, where, inside, {**last, **others})


@pytest.mark.parametrize(
    ("ranks", "who", "words"),
    [
        ([rank(0, "all_reduce #7"), rank(1, entered=6)], 1,
         "it never entered all_reduce #7; it is in f.py:1 g()"),
        ([rank(0, "all_reduce #7"), rank(1), rank(2, entered=6)], 1,
         "ranks 1, 2 never entered all_reduce #7; it is in f.py:1 g()"),
        # Rank 1 is late for the others because it waits itself, for rank 2 in another group.
        ([rank(0, "all_reduce #7"), rank(1, "broadcast #3 of A", **{"0": 6}),
          rank(2, entered=6, A=2)], 2, "never entered all_reduce #7; it is in f.py:2 g()"),
        ([rank(0, "all_reduce #7"), rank(1, "barrier #7")], None,
         "different collectives: rank 0 in all_reduce at f.py:0 g(), rank 1 in barrier at f.py:1"),
        ([rank(0, "all_reduce #7"), rank(1, "all_reduce #7")], None, "all ranks are in all_reduce"),
        ([rank(0, "all_reduce #7"), rank(1, entered=6, state="T")], 1, "it is stopped (SIGSTOP"),
        ([rank(0, "all_reduce #7"), rank(1, entered=6, state="D")], 1, "it waits in the kernel"),
        ([rank(0), rank(1)], None, "no rank makes progress"),
        ([], None, "no rank has started: every torchrun waits for the others"),
    ],
)  # fmt: skip
def test_culprit_and_reading_agree_with_table(
    ranks: list[StuckRank], who: int | None, words: str
) -> None:
    found = find_culprit(ranks)
    assert (found.rank if found else None) == who
    assert words in describe_hang(ranks)
