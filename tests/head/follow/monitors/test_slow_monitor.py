"""When nodes are asked who is late, and what is told of it."""

from __future__ import annotations

import json
from pathlib import Path
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

    def __init__(self, outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(watcher, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.found: list[SlowRank] = []
        self.monitor = SlowMonitor("job", NODES, outputs, self.found.append)
        self.asked: list[tuple[float, int, bool]] = []
        self.paces: dict[int, Pace] = {}
        self.followers: Any = [Follower(index, self) for index in (0, 1)]

    def look_until(
        self,
        until: float,
        awake: tuple[float, float] = (0.0, 0.0),
        denied: tuple[float, float] = (0.0, 0.0),
    ) -> list[tuple[float, SlowRank]]:
        """Look ten times a second; `awake` are the parts of it in which the programs run or want
        to, and `denied` those in which others have their cores."""
        told = []
        while self.now < until:
            self.now = round(self.now + 0.1, 1)
            self.paces = {
                node: pace.replace(
                    at=self.now, awake=self.now * awake[node], denied=self.now * denied[node]
                )
                for node, pace in self.paces.items()
            }
            self.monitor.check(self.followers)
            told += [(self.now, found) for found in self.found]
            self.found.clear()
        return told


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("awake", "cause", "why"),
    [
        ((0.4, 0.8), "slow compute", "it computes longer"),
        ((0.4, 0.4), "slow input", "it waits for its data"),
    ],
)
def test_who_is_late_in_two_looks_is_told_once(
    awake: tuple[float, float], cause: str, why: str, nodes: Nodes
) -> None:
    nodes.paces = trained([0.3, 0.3], extra=0.2)
    ((when, slow),) = nodes.look_until(300, awake)
    assert when == pytest.approx(57, abs=1)
    assert (slow.cause, slow.node, slow.rank) == (cause, 1, 1)
    assert slow.text.startswith("rank 1 (node 1, gpu01) holds the others up for 39% of each step")
    assert why in slow.text
    assert nodes.asked[:4] == [(30.0, 0, False), (30.0, 1, False), (33.0, 0, True), (33.0, 1, True)]


def test_who_is_late_as_other_programs_have_its_cores_is_not_told(nodes: Nodes) -> None:
    nodes.paces = trained([0.3, 0.3], extra=0.2)
    assert nodes.look_until(300, (0.5, 0.9), denied=(0.1, 0.5)) == []
    assert len(nodes.look_until(600, (0.9, 0.9), denied=(0.4, 0.4))) == 1, "both have too few"


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


def test_gpus_are_judged_by_samples_that_go_on(nodes: Nodes) -> None:
    about = {"time": 1.0, "node": 0, "about": {}, "gpus": ["H100"]}
    outputs = nodes.monitor.outputs

    def sampled(seconds: range) -> None:
        for node, use in ((0, 1.0), (1, 0.6)):
            with (outputs / f"node_0{node}_metrics.jsonl").open("a") as file:
                for second in seconds:
                    line = {"time": float(second), "gpu": {"use": [use], "mhz": [1900]}}
                    file.write(json.dumps(line) + "\n")

    for node in (0, 1):
        line = {**about, "about": {"host": f"gpu0{node}", "gpus": ["H100"]}}
        (outputs / f"node_0{node}_metrics.jsonl").write_text(json.dumps(line) + "\n")
    sampled(range(5, 60, 5))
    assert nodes.look_until(32) == []
    sampled(range(60, 120, 5))
    ((_, slow),) = nodes.look_until(60)
    assert (slow.node, slow.rank, slow.cause) == (1, 1, "slow input")
    assert slow.text.startswith("GPU 0 of node 1 (gpu01) is busy 60% of the time")
    assert nodes.asked == []
    nodes.monitor.named.clear()
    assert nodes.look_until(300) == []  # nothing new is known of them
