"""What only some nodes have of what a program saved."""

from __future__ import annotations

import pytest

from orchestrator.head.restart.lone_files import lone


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
        ({0: ["a.pt"], 1: ["a.pt"], 2: []}, "saved on node 0, node 1 only: a.pt; ranks on other"),
    ],
)
def test_what_is_told(names: dict[int, list[str]], said: str) -> None:
    told = lone(names)
    assert told.startswith(said) and bool(told) == bool(said)
