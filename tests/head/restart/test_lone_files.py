"""What only some nodes have of what a program saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.errors import NodeError
from orchestrator.head.restart import lone_files
from orchestrator.head.restart.gather import Gathered
from orchestrator.head.restart.lone_files import lone, warn
from orchestrator.protocol.messages import AskSaved, Saved
from tests.head.restart.test_gather import node, record


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({0: ["a.pt"], 1: ["a.pt"]}, ""),
        ({0: [], 1: []}, ""),
        # Each has its own: of ranks, of steps that one was a moment ahead with.
        ({0: ["rank_0.pt", "rank_1.pt"], 1: ["rank_2.pt", "rank_3.pt"]}, ""),
        ({0: ["step_20/a.pt", "step_40/a.pt"], 1: ["step_20/a.pt"]}, ""),
        ({0: ["out/last.ckpt"], 1: []}, "saved on node 0 only: out/last.ckpt; ranks on other"),
        (
            {
                0: ["c-30/model.bin", "c-30/optimizer.pt"],
                1: ["c-30/rng_2.pth"],
                2: ["c-30/rng_4.pth"],
            },
            "saved on node 0 only: c-30/model.bin and 2 more; ranks on other",
        ),
        # torch.distributed.checkpoint's, which no copy of rank 0's part makes whole.
        ({0: ["a.pt", "s_4/.metadata"], 1: []}, "each node has its own part alone of s_4: torch"),
        ({0: ["a.pt"], 1: ["a.pt"], 2: []}, "saved on node 0, node 1 only: a.pt; ranks on other"),
    ],
)
def test_what_is_told(names: dict[int, list[str]], said: str) -> None:
    told = lone(names)
    assert told.startswith(said) and bool(told) == bool(said)


def test_each_node_is_asked_for_its_part_and_a_new_one_has_nothing() -> None:
    asked: list[AskSaved] = []

    def channel(*names: str, gone: bool = False) -> Any:
        def ask(request: AskSaved, _: float) -> Saved:
            asked.append(request)
            if gone:
                raise NodeError("no such job here")
            return Saved(names=names)

        return SimpleNamespace(ask=ask)

    said: list[str] = []
    channels = [channel("a.pt\x1b[2J"), channel(gone=True)]
    gathered = Gathered([node(0, "a"), node(1, "b")], cast("Any", channels))
    warn(record("ab"), gathered, said.append, lambda: None)
    assert sorted((request.job, request.node) for request in asked) == [("run-1", 0), ("run-1", 1)]
    assert len(said) == 1 and said[0].startswith("WARNING: saved on node 0 only: a.pt")
    assert "\x1b" not in said[0], "what a node says is not written to the terminal as it is"


def test_a_network_disk_that_lags_behind_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does not see a checkpoint would begin anew beside those that go on."""
    monkeypatch.setattr(lone_files, "LOOK_SECONDS", 0.0)
    seen: list[tuple[str, ...]] = [("a_4.pt", "a_8.pt"), ("a_4.pt", "a_8.pt"), ("a_4.pt",), ()]
    stops: list[None] = []

    def new(*_: object) -> Saved:
        return Saved(names=("a_4.pt", "a_8.pt"), shared=True)

    def late(*_: object) -> Saved:
        return Saved(names=seen.pop(), shared=True)

    said: list[str] = []
    channels = [SimpleNamespace(ask=new), SimpleNamespace(ask=late)]
    gathered = Gathered([node(0, "a"), node(1, "b")], cast("Any", channels))
    warn(record("ab"), gathered, said.append, lambda: stops.append(None))
    assert len(said) == 1 and said[0].startswith("not every node sees a_4.pt yet")
    assert len(seen) == 1 and len(stops) == 2, "it goes on as soon as all nodes see all"

    monkeypatch.setattr(lone_files, "LAG_SECONDS", 0.0)
    seen[:] = [()]
    warn(record("ab"), gathered, said.append, lambda: None)
    assert said[2].startswith("WARNING: saved on node 0 only: a_4.pt; ranks on other nodes")
