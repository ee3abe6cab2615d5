"""Samplers of a program's own: drawn as late as torch's loader draws, and after a resume alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from orchestrator.engine.data.draws import folded
from tests.engine.worlds import Job, run

GO_ON = {
    *("random", "replaced", "weighted", "OwnGenerator", "Global", "Told", "Stateful"),
    *("Growing", "Buckets", "batched", "Parts", "Own", "stream"),
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resume_draws_what_would_have_come_or_is_refused(tmp_path: Path, ranks: int) -> None:
    job = Job(str(tmp_path / "job"), [ranks], {}, call="tests.engine.programs.samplers:samplers")
    (codes,) = run(job)
    assert codes == [0] * ranks, job.output()
    for rank in range(ranks):
        results = json.loads((job.path / f"results_{rank}").read_text())
        assert {kind for kind, found in results.items() if found == ["same"] * 3} == GO_ON, results
        *warned, first, second, between = results["Learning"]
        assert ["does not draw again what it drew" in each for each in warned] == [True] * (
            not rank
        )
        for number, each in enumerate((first, second)):
            assert f"CheckFailed: Learning does not draw in epoch {number} what" in each
            assert 'save_every="1 epoch"' in each
        assert between == "same"
        for number, each in zip((0, 0, 1), results["Unseeded"], strict=True):
            assert f"CheckFailed: Unseeded does not draw in epoch {number} what" in each
            assert "give it state_dict() and load_state_dict()" in each
        within, _, after = results["another"]
        assert "which OwnGenerator of 12 had drawn" in within and "is left for Another" in within
        drawn_by = (
            "the epochs before were drawn by OwnGenerator of 12, those from now on by Another"
        )
        assert (drawn_by in after) == (rank == 0)
        assert results["Level"][:2] == ["same"] * 2
        named = "WARNING: level of Level is not what it was when it was saved"
        assert "DIFFERS" in results["Level"][2] and (named in results["Level"][2]) == (rank == 0)
        # As torch's own loader asks for them: the second batch once the first was learned from.
        begins = [[0, 1, 2, 3], [9, 10, 11, 0], [6, 7, 8, 9]]
        assert results["as drawn"][:3] == [batch[rank::ranks] for batch in begins]


def test_a_number_stands_for_what_was_drawn() -> None:
    """It is the same for what is equal, in whatever pieces, and another for anything else."""
    assert folded(folded(0, [1, 2]), [3]) == folded(0, [1, 2, 3]) == folded(0, torch.arange(1, 4))
    drawn: list[list[object]] = [
        *([], [0], [0, 0], [1], [[1]], [[1, 2]], [[1], [2]], [1, 2], [2, 1], [-1], [None]),
        *(["a"], ["b"], [b"a"], [1.5], [2.5], [{"a": 1}], [{"a": 2}], [torch.ones(2)]),
    ]
    assert len({folded(0, each) for each in drawn}) == len(drawn)
    assert folded(0, [object()]) == folded(0, [object()])  # of which nothing is known
