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
from orchestrator.engine.models.losses import Size, came
from tests.engine.worlds import Job, run

CASES = 5 + 2 * 4  # ways to collate, and two containers under each strategy


@pytest.mark.parametrize("ranks", [1, 2])
def test_as_a_plain_loop_on_one_process(tmp_path: Path, ranks: int) -> None:
    job = Job(str(tmp_path / "job"), [ranks], {}, call="tests.engine.programs.rows:rows")
    (codes,) = run(job)
    assert codes == [0] * ranks, job.output()
    for rank in range(ranks):
        results = json.loads((job.path / f"results_{rank}").read_text())
        without, predict = results.pop("loss="), results.pop("predict")
        assert "the model is a ModuleDict, which has no forward" in without
        assert "use step=, a function of (model, batch)" in without
        assert "the model cannot be called" in predict and "give output=" in predict
        assert len(results) == (CASES if ranks > 1 else 7)
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


COLLATES: dict[str, tuple[Callable[[Any], Any], int]] = {  # with the rows of three samples
    "two rows each, three columns": (lambda rows: torch.stack([*rows, *rows]), 6),
    "two rows each, three parts": (lambda rows: (torch.stack([*rows, *rows]),) * 3, 6),
    "a column each": (lambda rows: torch.stack([row.repeat(2) for row in rows], 1), 3),
    "a list of samples, two rows each": (lambda rows: [row.expand(2, 3) for row in rows], 3),
}


@pytest.mark.parametrize("name", COLLATES)
def test_a_collate_is_asked_where_shapes_leave_open_what_the_samples_are(name: str) -> None:
    collate, many = COLLATES[name]
    batch = Counting(collate)([torch.ones(3)] * 3)
    assert came(batch.data, batch.size) == many


def test_a_collate_that_cannot_be_asked_is_refused() -> None:
    def of_three(rows: list[torch.Tensor]) -> torch.Tensor:
        assert len(rows) == 3
        return torch.stack([*rows, *rows])

    batch = Counting(of_three)([torch.ones(3)] * 3)
    with pytest.raises(UsageError, match="3 samples has tensors of 6 x 3"):
        came(batch.data, batch.size)
    with pytest.raises(UsageError, match=r"return \(sum, count\)"):
        came(torch.ones(6, 3), Size(3))
