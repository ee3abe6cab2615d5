"""A mean counts the rows that came, and models that only hold others train like any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from orchestrator.common.errors import UsageError
from orchestrator.engine.data.sharded_loader import MapShard
from orchestrator.engine.models.losses import came
from tests.engine.data.test_loaders import ranks
from tests.engine.worlds import Job, run

CASES = 4 + 2 * 4  # ways to collate, and two containers under each strategy


@pytest.mark.parametrize("ranks", [1, 2])
def test_as_a_plain_loop_on_one_process(tmp_path: Path, ranks: int) -> None:
    job = Job(str(tmp_path / "job"), [ranks], {}, call="tests.engine.programs.rows:rows")
    (codes,) = run(job)
    assert codes == [0] * ranks, job.output()
    for rank in range(ranks):
        results = json.loads((job.path / f"results_{rank}").read_text())
        without, predict = results.pop("loss="), results.pop("predict")
        assert "and nothing says whether a mean is over the 2 rows" in results.pop("second")
        assert "the model is a ModuleDict, which has no forward" in without
        assert "use step=, a function of (model, batch)" in without
        assert "the model cannot be called" in predict and "give output=" in predict
        assert len(results) == (CASES if ranks > 1 else 6)
        for name, difference in results.items():
            assert isinstance(difference, float) and difference < 1e-5, (name, difference)


def two_rows_each(rows: list[Tensor]) -> Tensor:
    return torch.stack([*rows, *rows])


def sizes(collate: Callable[[list[Tensor]], Any], batch_size: int) -> list[int]:
    """Return the samples that batches of seven are taken for."""
    data: Any = [torch.ones(3)] * 7
    loader: Any = DataLoader(data, batch_size, collate_fn=collate)
    micros = MapShard(loader, ranks(1)[0], 0).epoch(0)
    return [came(micro.data, micro.size) for micro in micros if micro.size is not None]


def test_the_first_clear_batch_shows_that_rows_are_samples() -> None:
    assert sizes(two_rows_each, 4) == [8, 6]


COLLATES: dict[str, Callable[[list[Tensor]], Any]] = {
    "two rows each, three columns": two_rows_each,
    "two rows each, three parts": lambda rows: (two_rows_each(rows),) * 3,
    "a column each": lambda rows: torch.stack([row.repeat(2) for row in rows], 1),
    "a list of samples, two rows each": lambda rows: [row.expand(2, 3) for row in rows],
}


@pytest.mark.parametrize("name", COLLATES)
def test_a_batch_that_leaves_open_what_the_samples_are_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"3 samples has tensors of \d.* and nothing says"):
        sizes(COLLATES[name], 3)
