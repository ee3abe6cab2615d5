"""When a port that cannot be reached is called the cause, and when it is not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from orchestrator.head.follow import start_monitor
from orchestrator.head.follow.start_monitor import LinkMonitor, StartMonitor
from orchestrator.head.follow.verdict import Failure
from orchestrator.protocol.messages import Dialed, Listen, Listening
from orchestrator.records.experiment import NodeRecord

SILENCE, REFUSED = "no answer in 3 s", "connection refused"


@dataclass
class Clock:
    now: float = 100.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@dataclass
class CalledFollower:
    """The part of a follower that the monitor uses."""

    index: int
    requests: list[Any] = field(default_factory=list)

    @property
    def node(self) -> CalledFollower:
        return self

    @property
    def name(self) -> str:
        return f"n{self.index}"

    def ask(self, request: Any) -> None:
        self.requests.append(request)


def watch(
    monkeypatch: pytest.MonkeyPatch,
    rounds: list[dict[int, str]],
    *,
    nodes: int = 3,
    begun_after: float = 1000.0,
) -> tuple[Failure | None, float, int]:
    """Answer the calls of each round; return the failure, when it came, and how often was asked."""
    clock = Clock()
    monkeypatch.setattr(start_monitor, "time", clock)
    monitor = StartMonitor("fd00::1:29500" if nodes == 2 else "10.0.0.1:29500")
    followers = [CalledFollower(index) for index in range(nodes)]
    asked = 0
    for tenth in range(600):
        clock.now = 100.0 + tenth / 10
        failure = monitor.look(followers, begun=tenth / 10 > begun_after)  # type: ignore[arg-type]
        if failure:
            return failure, tenth / 10, asked
        if len(followers[0].requests) > asked:
            for node, why in rounds[min(asked, len(rounds) - 1)].items():
                monitor.answer(node, Dialed(answers=(why,)))
            asked += 1
    return None, 60.0, asked


def test_a_port_that_is_closed_twice_is_the_cause_within_thirty_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failure, after, asked = watch(monkeypatch, [{0: "", 1: SILENCE, 2: ""}])
    assert failure is not None
    assert failure.message == (
        "the ranks cannot meet at 10.0.0.1:29500, the master's port: from node 1 (n1):"
        " no answer in 3 s"
    )
    assert failure.kind == "communication" and "open all TCP ports" in failure.fix
    assert (after + 2 * start_monitor.DIAL_SECONDS < 30, asked) == (True, 2)


@pytest.mark.parametrize(
    ("rounds", "nodes", "blamed"),
    [
        ([{0: REFUSED, 1: REFUSED, 2: REFUSED}], 3, ""),  # torch is still being imported
        ([{0: REFUSED, 1: SILENCE, 2: SILENCE}], 3, ""),  # as long as that is so, nothing is known
        ([{0: "", 1: REFUSED, 2: REFUSED}], 3, "node 1 (n1): connection refused; node 2"),
        ([{0: REFUSED, 1: REFUSED}, {0: "", 1: REFUSED}], 2, "node 1"),  # a firewall's reset
        ([{0: "", 1: SILENCE, 2: ""}, {0: "", 1: "", 2: ""}], 3, ""),  # a moment's loss
        ([{0: "", 1: SILENCE, 2: ""}, {0: "", 1: "", 2: SILENCE}, {0: "", 1: "", 2: ""}], 3, ""),
        ([{0: SILENCE, 1: SILENCE, 2: SILENCE}], 3, "node 0"),  # its firewall drops its own calls
        ([{1: SILENCE, 2: SILENCE}], 3, ""),  # the master says nothing: it may be lost
        ([{0: "", 1: "", 2: ""}], 3, ""),
    ],
)
def test_whom_it_blames(
    monkeypatch: pytest.MonkeyPatch, rounds: list[dict[int, str]], nodes: int, blamed: str
) -> None:
    failure, _, _ = watch(monkeypatch, rounds, nodes=nodes)
    assert blamed in failure.message if failure and blamed else failure is None and not blamed


def test_nobody_calls_once_a_rank_has_begun_or_where_nobody_else_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert watch(monkeypatch, [{0: "", 1: SILENCE}], begun_after=5.0)[2] == 0
    assert watch(monkeypatch, [{0: SILENCE}], nodes=1)[2] == 0


NODES = [NodeRecord(n, f"n{n}", f"n{n}", None, None, f"10.0.0.{n + 1}", "", n, 1) for n in range(3)]


def calls(
    monkeypatch: pytest.MonkeyPatch,
    rounds: list[set[tuple[int, int]]],
    *,
    deaf: frozenset[int] = frozenset(),
    begun_after: float = 5.0,
) -> tuple[str, float, list[str]]:
    """Let these calls fail in each round; return what is said, when, and what nodes were asked."""
    clock = Clock()
    monkeypatch.setattr(start_monitor, "time", clock)
    monitor = LinkMonitor(NODES)
    followers: Any = [CalledFollower(index) for index in range(3)]
    asked: list[str] = []
    for tenth in range(600):
        clock.now = 100.0 + tenth / 10
        said = monitor.look(followers, begun=tenth / 10 >= begun_after)
        if said or monitor.over:
            return said, tenth / 10, asked
        asked += {
            type(follower.requests[-1]).__name__ for follower in followers if follower.requests
        }
        for follower in followers:
            for request in follower.requests:
                if isinstance(request, Listen):
                    if follower.index not in deaf:
                        monitor.answer(follower.index, Listening(ports=(7000 + follower.index,)))
                    continue
                fails = rounds[asked.count("Dial") - 1]
                called = [port - 7000 for _, port, _ in request.places]
                assert [address for address, _, _ in request.places] == [
                    f"10.0.0.{node + 1}" for node in called
                ]
                whys = [SILENCE if (follower.index, node) in fails else "" for node in called]
                monitor.answer(follower.index, Dialed(answers=tuple(whys)))
            follower.requests.clear()
    return "", 60.0, asked


def test_calls_that_fail_twice_are_told_within_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    said, after, asked = calls(monkeypatch, [{(1, 2), (0, 1)}, {(1, 2), (2, 1)}])
    assert said == (
        "WARNING: nodes cannot reach each other: node 1 (n1) calls node 2 (n2) at 10.0.0.3:"
        f" no answer in 3 s; {start_monitor.OPEN_ALL}"
    )
    assert after - 5.0 - start_monitor.LINKS_AFTER < 1
    assert asked == ["Listen", "Dial", "Dial"]
    everybody = {(a, b) for a in range(3) for b in range(3) if a != b}
    said, _, _ = calls(monkeypatch, [everybody, everybody])
    assert said.count("calls") == 4 and "; and 3 more calls; open" in said


def test_nodes_that_reach_each_other_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said, _, asked = calls(monkeypatch, [set()])
    assert (said, asked) == ("", ["Listen", "Dial"])
    said, _, asked = calls(monkeypatch, [{(0, 1)}, set()])
    assert (said, asked) == ("", ["Listen", "Dial", "Dial"])
    said, after, asked = calls(monkeypatch, [{(0, 1)}, {(0, 1)}], deaf=frozenset({2}))
    assert "node 0 (n0) calls node 1" in said and after < 5 + 10 + 10 + 2
    said, after, asked = calls(monkeypatch, [{(0, 1)}, {(0, 1)}], begun_after=0.0)
    assert (said, after, asked) == ("", 0.0, [])  # an attach, to a job that runs
