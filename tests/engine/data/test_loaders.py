"""The loaders that people really write, on one rank and on two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.worlds import Job, run

TWELVE = [*map(float, range(12)), 5.5]  # each number once, and their mean
LIKE_TUPLES = ("namedtuples", "dataclasses", "graphs", "encodings", "sums of graphs")


@pytest.mark.parametrize("nodes", [[1], [2]])
def test_loaders_that_people_write(tmp_path: Path, nodes: list[int]) -> None:
    """What is not right is refused, on all ranks, before anything is trained."""
    job = Job(str(tmp_path / "job"), nodes, {}, call="tests.engine.ordinary:loaders")
    (codes,) = run(job)
    assert codes == [0] * sum(nodes), job.told()
    for rank in range(sum(nodes)):
        told: dict[str, Any] = json.loads((job.path / f"told_{rank}").read_text())
        for name in LIKE_TUPLES:
            assert told[name] == pytest.approx(told["tuples"]), name
        for name in ("tuples", "strings", "packed", "NaN in a stream"):
            assert isinstance(told[name], float), (name, told[name])
        for name in ("weighted", "weighted stream"):
            assert told[name][0] == pytest.approx(told[name][1]), name
        assert told["batch sampler"] == told["parts"] == told["own parts"] == TWELVE
        assert told["endless"] == 9 * sum(nodes) + 1
        assert told["persistent"] is told["generator"] is True
        alone = sum(nodes) == 1
        if alone:
            assert told["no length"] == [0.0, 1.0, 2.0, 3.0, 4.0, 2.0]
        for name, words in {
            "hidden parts": "dealing out those of rank 0 would lose the rest" * (not alone),
            "named loss": "has a metric named 'loss', which is taken",
            "other names": "give the same metrics everywhere" * (not alone),
            "spent": "val_loader is a list_iterator, which gives its batches only once",
            "spent training": "train_loader is a generator",
            "empty": "there is not one batch to train or evaluate with",
        }.items():
            assert words in str(told[name]), (name, told[name])
        assert told["out of order"][-1] == pytest.approx(6.0)
