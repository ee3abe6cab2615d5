"""Which device is named when bits differ."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.views.verify import report

GOOD = {"product": [1], "sum": [2]}
OTHER = {"product": [9], "sum": [2]}


def results(*hashes: dict[str, list[int]], kinds: str = "aaaa") -> dict[str, Any]:
    """One rank on each node."""
    return {
        "nodes": [{"index": n, "host": f"h{n}", "ranks": [n]} for n in range(len(hashes))],
        "bits": {
            "kinds": list(kinds[: len(hashes)]),
            "hashes": list(hashes),
            "rounds": [5] * len(hashes),
        },
    }


@pytest.mark.parametrize(
    ("hashes", "kinds", "nodes", "words"),
    [
        ([GOOD] * 4, "aaaa", [], ""),
        ([GOOD, GOOD, OTHER], "aaa", [(2,)],
         "the device of rank 2 on node 2 (h2) gets other bits than the 2 others of its kind:"
         " product (a)"),
        ([GOOD, OTHER], "aa", [(0, 1)], "no majority says which one is right: product"),
        ([GOOD, OTHER], "ab", [], ""),
        ([GOOD, OTHER, OTHER, GOOD], "abba", [], ""),
        ([{"product": [1, 3], "sum": [2]}], "a", [(0,)],
         "the device of rank 0 on node 0 (h0) does not get the same bits twice: product"),
        ([GOOD, {"product": [9, 1], "sum": [2]}], "aa", [(1,)], "rank 1"),
    ],
)  # fmt: skip
def test_who_is_named(
    hashes: list[dict[str, list[int]]], kinds: str, nodes: list[Any], words: str
) -> None:
    found = report.findings(results(*hashes, kinds=kinds))
    assert [item.nodes for item in found] == nodes
    assert all(item.kind == "wrong" for item in found)
    text = report.bits_text(results(*hashes, kinds=kinds), found)
    assert words in text
    assert ("gave the same bits" in text) == (not nodes)


def test_one_alone_of_its_kind_is_compared_with_itself() -> None:
    assert "compared with itself only" in report.bits_text(results(GOOD), [])
