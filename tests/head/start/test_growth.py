"""Planned changes cost no restart, and a node with which nothing works is let rest."""

from __future__ import annotations

import pytest

from orchestrator.head.start import growth, policy
from orchestrator.records.experiment import Attempt

LOST = {"kind": "lost", "node": 1, "node_name": "b", "message": "gone"}
BUG = {"kind": "exception", "node": 2, "node_name": "c", "message": "ImportError", "where": "x"}


def attempts(*rows: tuple[str, str, int | None]) -> list[Attempt]:
    """Attempts of 50 s, each by its end, its nodes and the step that it had reached."""
    verdicts = {"lost": LOST, "failed": BUG}
    return [
        Attempt(number, "j", 50.0 * number, 50.0 * number + 50, state, 1, verdicts.get(state),
                list(nodes), step=step)
        for number, (state, nodes, step) in enumerate(rows, 1)
    ]  # fmt: skip


SHRUNK = ("lost", "abc", 10)
GROWN = ("resized", "ac", 20)


@pytest.mark.parametrize(
    ("rows", "allowed", "restarts", "most"),
    [
        ([SHRUNK], 1, True, 2),
        ([SHRUNK, GROWN, ("lost", "acb", 30)], 1, False, 3),  # the second failure
        ([SHRUNK, GROWN, ("lost", "acb", 30)], 2, True, 4),
        ([SHRUNK, GROWN, ("lost", "acb", 20)], 1, True, 4),  # of what had joined: as if it had not
        ([SHRUNK, GROWN, ("failed", "acb", None)], 1, True, 4),
        ([SHRUNK, GROWN, ("failed", "acb", 20), ("failed", "ac", 20)], 1, False, 4),
        ([SHRUNK, GROWN, ("failed", "acb", 20), GROWN, ("failed", "acd", 20)], 1, True, 6),
        ([SHRUNK, GROWN, ("lost", "acb", 30), ("resized", "ac", 40), ("lost", "acb", 50)], 9, True,
         12),
        ([("lost", "abc", 0), ("resized", "ac", 0), ("lost", "acb", 0), ("lost", "ac", 0)], 9, True,
         12),
    ],
)  # fmt: skip
def test_what_a_planned_change_costs(
    rows: list[tuple[str, str, int | None]], allowed: int, restarts: bool, most: int
) -> None:
    ended = attempts(*rows)
    assert policy.decide(ended, allowed).restart == restarts
    assert policy.attempts_allowed(ended, allowed) == most


@pytest.mark.parametrize(
    ("rows", "after", "words"),
    [
        ([SHRUNK], 0, ""),  # it was lost, and may come back at any time
        ([SHRUNK, GROWN, ("lost", "acb", 30)], 0, ""),
        ([SHRUNK, GROWN, ("lost", "acb", 20)], 0, "it rests for 10 min"),
        ([SHRUNK, GROWN, ("lost", "acb", 20)], 601, ""),
        ([SHRUNK, *[GROWN, ("lost", "acb", 20)] * 2], 601, "it rests for"),
        ([SHRUNK, *[GROWN, ("lost", "acb", 20)] * 2], 1201, ""),
        ([SHRUNK, *[GROWN, ("lost", "acb", 20)] * 3], 10**6, "has joined 3 times"),
        ([SHRUNK, GROWN, ("lost", "acd", 20)], 0, ""),  # another one had joined
    ],
)
def test_a_node_rests(
    rows: list[tuple[str, str, int | None]], after: float, words: str
) -> None:  # fmt: skip
    ended = attempts(*rows)
    found = growth.refusal(ended, "b", ended[-1].ended + after)
    assert words in found if words else not found


def test_looks_become_rarer() -> None:
    pauses = [growth.pause(30.0, looks) for looks in range(1, 8)]
    assert pauses == [30.0, 60.0, 120.0, 240.0, 300.0, 300.0, 300.0]
