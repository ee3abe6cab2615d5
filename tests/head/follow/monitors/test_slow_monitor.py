"""When nodes are asked who is late, and what is told of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.head.follow.monitors import watcher
from orchestrator.head.follow.monitors.slow_monitor import SlowMonitor
from orchestrator.protocol.requests.follow import AskPaces, Pace, Paces
from orchestrator.records.experiment import NodeRecord
from orchestrator.records.outcome import SlowRank
from tests.head.follow.monitors.test_late_rank import trained

NODES = [NodeRecord(n, f"gpu0{n}", f"gpu0{n}", None, None, "", "", n, 1) for n in range(2)]


class Follower:
    """Answers for a node as its server does: with what its ranks had written."""

    def __init__(self, index: int, nodes: Nodes) -> None:
        self.node = SimpleNamespace(index=index)
        self.clock = SimpleNamespace(offset=0.0, error=0.001)
        self.nodes = nodes

    def ask(self, request: AskPaces) -> None:
        self.nodes.asked.append((self.nodes.now, request.node, request.read))
        paces = {request.node: self.nodes.paces[request.node]} if request.read else {}
        self.nodes.monitor.answer(request.node, Paces(paces=paces))


class Nodes:
    """Two nodes with a rank each, and the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(watcher, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.found: list[SlowRank] = []
        self.monitor = SlowMonitor("job", NODES, self.found.append)
        self.asked: list[tuple[float, int, bool]] = []
        self.paces: dict[int, Pace] = {}
        self.followers: Any = [Follower(index, self) for index in (0, 1)]

    def look_until(
        self, until: float, denied: tuple[float, float] = (0.0, 0.0)
    ) -> list[tuple[float, SlowRank]]:
        """Look ten times a second; `denied`: in what part of it others have the ranks' cores."""
        told = []
        while self.now < until:
            self.now = round(self.now + 0.1, 1)
            self.paces = {
                node: pace.replace(at=self.now, denied=self.now * denied[node])
                for node, pace in self.paces.items()
            }
            self.monitor.check(self.followers)
            told += [(self.now, found) for found in self.found]
            self.found.clear()
        return told


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(monkeypatch)


def test_who_is_late_in_two_looks_is_told_once(nodes: Nodes) -> None:
    nodes.paces = trained([0.3, 0.3], extra=0.2)
    ((when, slow),) = nodes.look_until(300)
    assert when == pytest.approx(57, abs=1)
    assert (slow.cause, slow.node, slow.rank) == ("late rank", 1, 1)
    assert slow.text == "rank 1 (node 1, gpu01) holds the others up for 39% of each step"
    assert nodes.asked[:4] == [(30.0, 0, False), (30.0, 1, False), (33.0, 0, True), (33.0, 1, True)]


def test_who_is_late_as_other_programs_have_its_cores_is_not_told(nodes: Nodes) -> None:
    nodes.paces = trained([0.3, 0.3], extra=0.2)
    assert nodes.look_until(300, (0.1, 0.5)) == []
    assert len(nodes.look_until(600, (0.4, 0.4))) == 1, "both have too few"


def test_who_is_late_once_is_not_told(nodes: Nodes) -> None:
    nodes.paces = trained([0.3, 0.3], extra=0.2)
    assert nodes.look_until(40) == []
    nodes.paces = trained([0.3, 0.3], jitter=0.1)
    assert nodes.look_until(300) == []
    writes = [when for when, node, read in nodes.asked if not read and not node]
    assert writes == pytest.approx([30, 51, 117, 183, 249], abs=1)  # it takes a rank 0.1 s each


def test_ranks_of_which_one_says_nothing_are_not_judged(nodes: Nodes) -> None:
    nodes.paces = trained([0.3, 0.3], extra=0.2)
    nodes.monitor.nodes = [*NODES, NodeRecord(2, "gpu02", "gpu02", None, None, "", "", 2, 1)]
    assert nodes.look_until(100) == []
    nodes.monitor.nodes = NODES[:1]
    nodes.asked.clear()
    assert nodes.look_until(200) == [] and nodes.asked == []  # one rank waits for nobody
