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
    assert codes == [0] * sum(nodes), job.output()
    for rank in range(sum(nodes)):
        results: dict[str, Any] = json.loads((job.path / f"results_{rank}").read_text())
        for name in LIKE_TUPLES:
            assert results[name] == pytest.approx(results["tuples"]), name
        for name in ("tuples", "strings", "packed", "NaN in a stream"):
            assert isinstance(results[name], float), (name, results[name])
        for name in ("weighted", "weighted stream"):
            assert results[name][0] == pytest.approx(results[name][1]), name
        assert results["batch sampler"] == results["parts"] == results["own parts"] == TWELVE
        assert results["endless"] == 9 * sum(nodes) + 1
        assert results["persistent"] is results["generator"] is True
        alone = sum(nodes) == 1
        if alone:
            assert results["no length"] == [0.0, 1.0, 2.0, 3.0, 4.0, 2.0]
        for name, words in {
            "hidden parts": "dealing out those of rank 0 would lose the rest" * (not alone),
            "named loss": "has a metric named 'loss', which is taken",
            "other names": "give the same metrics everywhere" * (not alone),
            "spent": "val_loader is a list_iterator, which gives its batches only once",
            "spent training": "train_loader is a generator",
            "empty": "there is not one batch to train or evaluate with",
        }.items():
            assert words in str(results[name]), (name, results[name])
        assert results["out of order"][-1] == pytest.approx(6.0)
