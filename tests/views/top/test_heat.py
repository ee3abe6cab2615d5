"""The map of all GPUs: a mark for each, fewer where there is no room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.head.screen import styles
from orchestrator.protocol.facts import Checkup
from orchestrator.views.top.heat import heat_map
from orchestrator.views.top.sample import NodeSample
from tests.views.top.samples import gpu, load


def nodes(count: int, *busy: int) -> list[NodeSample]:
    gpus = tuple(gpu(index, use) for index, use in enumerate(busy))
    one = NodeSample("", Checkup(gpus=gpus, holders=(), load=load("train-1f")))
    return [replace(one, name=f"gpu{number:03}") for number in range(count)]


def drawn(every: list[NodeSample], width: int = 80, most: int = 9) -> list[str]:
    return ["".join(text for text, _ in line) for line in heat_map(every, width, most)]


def test_each_gpu_is_a_mark_by_its_use() -> None:
    sick = NodeSample("sick", Checkup(gpus=(gpu(0, 50, "it is lost"),), holders=(), load=load()))
    every = [*nodes(15, 0, 50, 100), NodeSample("gone", problem="no answer"), sick]
    heading, first, *_ = drawn(every)
    assert heading.startswith("31 of 47 in use, a mark per GPU:")
    assert first.startswith("  gpu000  ·▅█ ·▅█ ")
    looks = {text: style for line in heat_map(every, 80, 9) for text, style in line if style}
    assert (looks["!"], looks["?"]) == (styles.FAILED, styles.WARNING)
    assert drawn(nodes(15, 50)) == []  # the table shows all of them


@pytest.mark.parametrize(
    ("count", "gpus", "what"),
    [(64, 8, "per GPU:"), (200, 8, "per node:"), (10_000, 8, "32 nodes:"), (64, 0, "CPUs:")],
)
def test_the_map_has_no_more_lines_than_there_is_room(count: int, gpus: int, what: str) -> None:
    lines = drawn(nodes(count, *[50] * gpus))
    assert what in lines[0] and len(lines) <= 9
    assert max(map(len, lines)) <= 80
    assert f"{count * max(1, gpus)} of {count * max(1, gpus)} in use" in lines[0]
