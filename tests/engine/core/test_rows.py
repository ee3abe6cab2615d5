"""A mean counts the rows that came, and models that only hold others train like any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.engine.data.sharded_loader import Counting
from orchestrator.engine.models.losses import came
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


def test_a_batch_of_which_nothing_is_left_is_named() -> None:
    collate = Counting(lambda rows: torch.stack([row for row in rows if row is not None]))
    assert collate([torch.ones(1), None]).size.samples == 1
    with pytest.raises(RuntimeError):
        collate([])
    empty = Counting(torch.stack)
    with pytest.raises(CheckFailed, match="of the 2 samples of a batch each is None"):
        empty([None, None])


def two_rows_each(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([*rows, *rows])


def test_the_first_clear_batch_shows_that_rows_are_samples() -> None:
    collate = Counting(two_rows_each)
    for samples in (4, 3):
        batch = collate([torch.ones(3)] * samples)
        assert came(batch.data, batch.size) == 2 * samples


COLLATES: dict[str, Callable[[Any], Any]] = {
    "two rows each, three columns": two_rows_each,
    "two rows each, three parts": lambda rows: (two_rows_each(rows),) * 3,
    "a column each": lambda rows: torch.stack([row.repeat(2) for row in rows], 1),
    "a list of samples, two rows each": lambda rows: [row.expand(2, 3) for row in rows],
}


@pytest.mark.parametrize("name", COLLATES)
def test_a_batch_that_leaves_open_what_the_samples_are_is_refused(name: str) -> None:
    batch = Counting(COLLATES[name])([torch.ones(3)] * 3)
    with pytest.raises(UsageError, match=r"3 samples has tensors of \d x 3, and nothing says"):
        came(batch.data, batch.size)
