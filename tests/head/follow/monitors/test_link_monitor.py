"""When nodes that cannot reach each other are named, and whom they call."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.head.follow.monitors import dial_monitors, watcher
from orchestrator.head.follow.monitors.dial_monitors import LinkMonitor
from orchestrator.protocol.requests.machine import Dialed, Listen, Listening
from orchestrator.records.experiment import NodeRecord
from tests.head.follow.monitors.test_dial_monitors import SILENCE, CalledFollower, Clock

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
    monkeypatch.setattr(watcher, "time", clock)
    monitor = LinkMonitor(NODES)
    followers: Any = [CalledFollower(index) for index in range(3)]
    asked: list[str] = []
    for tenth in range(600):
        clock.now = 100.0 + tenth / 10
        said = monitor.check(followers, begun=tenth / 10 >= begun_after)
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
        "nodes cannot reach each other: node 1 (n1) calls node 2 (n2) at 10.0.0.3: no answer in 3 s"
    )
    assert after - 5.0 - dial_monitors.LINKS_AFTER_SECONDS < 1
    assert asked == ["Listen", "Dial", "Dial"]
    everybody = {(a, b) for a in range(3) for b in range(3) if a != b}
    said, _, _ = calls(monkeypatch, [everybody, everybody])
    assert said.count("calls") == 4 and said.endswith("; and 3 more calls")


def test_nodes_that_reach_each_other_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said, _, asked = calls(monkeypatch, [set()])
    assert (said, asked) == ("", ["Listen", "Dial"])
    said, _, asked = calls(monkeypatch, [{(0, 1)}, set()])
    assert (said, asked) == ("", ["Listen", "Dial", "Dial"])
    said, after, asked = calls(monkeypatch, [{(0, 1)}, {(0, 1)}], deaf=frozenset({2}))
    assert "node 0 (n0) calls node 1" in said and after < 5 + 10 + 10 + 2
    said, after, asked = calls(monkeypatch, [{(0, 1)}, {(0, 1)}], begun_after=0.0)
    assert (said, after, asked) == ("", 0.0, [])  # an attach, to a job that runs


def test_of_many_nodes_each_calls_a_few_and_any_half_that_is_cut_off_shows() -> None:
    nodes = list(range(500))
    called = [dial_monitors.some_others(at, nodes) for at in nodes]
    assert {len(others) for others in called} == {9}
    assert all(at not in others for at, others in enumerate(called))
    assert {other for others in called for other in others} == set(nodes)
    for cut in (1, 13, 250, 499):
        assert any(at < cut <= other for at, others in enumerate(called) for other in others)
    few = list(range(dial_monitors.ALL_PAIRS))
    assert all(len(set(dial_monitors.some_others(at, few))) == len(few) - 1 for at in few)
