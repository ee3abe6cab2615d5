"""What a verify run says and draws: every figure that was measured is there."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.head.screen.output import Terminal
from orchestrator.views.verify import chart, diagnosis, report
from orchestrator.views.verify import command as verify
from orchestrator.views.verify.diagnosis import Bottleneck

SVG = "{http://www.w3.org/2000/svg}"


def told(nodes: int, sizes: int = 11) -> dict[str, Any]:
    rows = [
        {"collective": name, "scope": scope, "ranks": 2 * nodes, "bytes": 1024 * 4**power,
         "seconds": 1e-5 * 4**power, "busbw": 1e8 * (power + 1)}
        for name, scope in (("all_reduce", "all"), ("all_gather", "all"), ("all_gather", "node"))
        for power in range(sizes)
    ]  # fmt: skip
    barrier = {"collective": "barrier", "scope": "all", "bytes": 0, "seconds": 1e-4, "busbw": 0.0}
    return {
        "complete": True,
        "backend": "nccl",
        "collectives": [*rows, {**barrier, "ranks": 2 * nodes}],
        "pairs": [
            {"from": a, "to": b, "rate": 1e9, "latency": 1e-5}
            for a in range(nodes)
            for b in range(nodes)
            if a != b
        ],
        "nodes": [
            {"index": n, "host": f"h<{n}>", "ranks": [2 * n, 2 * n + 1], "link_speed": None}
            for n in range(nodes)
        ],
        "flops": [5e14] * 2 * nodes,
        "devices": ["H200"] * 2 * nodes,
    }


@pytest.mark.parametrize("nodes", [1, 2, 5, 17, 128])
@pytest.mark.parametrize("sizes", [1, 2, 11])
def test_the_picture_parses_and_holds_every_size(nodes: int, sizes: int) -> None:
    data = told(nodes, sizes)
    root = ET.fromstring(chart.draw(data))
    dots = [int(dot.get("data-bytes", "0")) for dot in root.iter(f"{SVG}circle")]
    sizes_of = [row["bytes"] for row in data["collectives"] if row["bytes"]]
    assert sorted(dots) == sorted(2 * sizes_of)  # bandwidth, time
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert sum(" to node " in title for title in titles) == nodes * (nodes - 1)
    height = float(root.get("height", "0"))
    for shape in root.iter():
        for name in ("cy", "y", "y1", "y2"):
            assert 0 <= float(shape.get(name, "0")) <= height
        for name in ("cx", "x", "x1", "x2"):
            far = float(shape.get(name, "0")) + float(shape.get("width", "0")) * (name == "x")
            assert 0 <= far <= chart.WIDTH


def test_nothing_measured_is_still_a_picture() -> None:
    ET.fromstring(chart.draw({"collectives": [], "pairs": []}))


@pytest.mark.parametrize("nodes", [2, 12, 13])
def test_the_table_has_every_size_and_every_node(nodes: int) -> None:
    text = report.to_text(told(nodes), [], [])
    lines = text.splitlines()
    for size in ("1 KiB", "256 KiB", "1 MiB", "1 GiB"):
        assert sum(line.strip().startswith(f"{size} ") for line in lines) == 2, text
    assert f"node {nodes - 1}" in text
    assert "every result is right, no node, link or device is slower than the others" in text
    assert "\x1b" not in text


def test_findings_stand_out() -> None:
    found = [Bottleneck("node", "node 1 is slow"), Bottleneck("wrong", "a wrong sum")]
    text = report.to_text(told(2), found, [], Terminal(color=True))
    assert "\x1b[33mSLOW: node 1 is slow\x1b[0m" in text
    assert "\x1b[1;31mWRONG: a wrong sum\x1b[0m" in text
    assert "every result is right" not in text


def test_a_run_that_was_cut_short_says_so() -> None:
    data = {key: told(2)[key] for key in ("nodes", "backend", "flops", "devices")}
    text = report.to_text({**data, "complete": False}, [], [])
    assert "the run ended before everything was measured" in text
    assert diagnosis.all_of(data) == []


@pytest.mark.parametrize(
    ("code", "kinds", "strict", "expected"),
    [
        (0, [], True, 0),
        (0, ["node"], False, 0),
        (0, ["node"], True, 3),
        (0, ["wrong"], False, 1),
        (1, ["wrong", "link"], True, 1),
        (4, ["link"], True, 4),
        (130, ["wrong"], False, 130),
    ],
)
def test_exit_codes(code: int, kinds: list[str], strict: bool, expected: int) -> None:
    found = [Bottleneck(kind, "") for kind in kinds]
    assert verify.exit_code(code, found, strict=strict) == expected


@pytest.mark.parametrize(
    ("text", "size"), [("1G", 1 << 30), ("64M", 64 << 20), ("1.5kb", 1536), ("2048", 2048)]
)
def test_sizes(text: str, size: int) -> None:
    assert verify.bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "big", "-1G", "1", "0K", "1G2", "1e9"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="--max-size"):
        verify.bytes_of(text)
