"""What people do with a Trainer, and what they find afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow


def test_what_people_do_with_a_trainer(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "job"), [2], {}, call="tests.engine.programs.habits:habits")
    (codes,) = run(job)
    assert codes == [0, 0], job.output()
    for rank in range(2):
        results = json.loads((job.path / f"results_{rank}").read_text())
        assert results["two trainers"] == [3 * 2 + 3, 2 + 1]  # two steps an epoch, and its own line
        *stay, moves = results["frozen"]
        assert stay == [0.0, 0.0]
        assert moves > 0.0
        assert results["exported"] == []
        assert max(results["kept open"]) < 4  # each of four directories took 3 threads and 5 files
        assert results["at home"] == [True, True, False]


def test_numbers_and_checkpoints_of_a_trainer(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "job"), [1], {}, call="tests.engine.programs.habits:numbers")
    (codes,) = run(job)
    assert codes == [0], job.output()
    results = json.loads((job.path / "results_0").read_text())
    assert results["dtypes"] == ["torch.bfloat16"] * 2
    assert results["nothing counts"] == ["nan", 12, True]
    assert results["other names"] == [True, True]
    assert results["into fp16"] is True
    assert "it was saved with AdamW, this is SGD" in results["other optimizer"]
    assert results["hooked"][0] == results["hooked"][1] > 0
    assert results["clamped"][0] == pytest.approx(results["clamped"][1], abs=1e-6)
    assert 'say scheduler_every="epoch"' in results["by epoch"]


def test_what_a_team_does_in_its_first_week(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "job"), [2], {}, call="tests.engine.programs.first_week:first_week")
    (codes,) = run(job)
    assert codes == [0, 0], job.output()
    for rank in range(2):
        results = json.loads((job.path / f"results_{rank}").read_text())
        (whole, *copies), (sharded, *_) = results["unfrozen"]
        assert copies[0] == copies[1], "what is unfrozen is summed over the ranks, too"
        assert whole == pytest.approx(sharded, abs=1e-5)
        copied, parted = results["unfrozen in bf16"]
        assert copied == pytest.approx(parted, abs=1e-4)
        assert "give it all of them from the start" in results["another group"]
        assert "a parameter of shape (2, 2) that is not the model's" in results["stranger"]
        assert "use_reentrant=False" in results["reentrant"]
        assert results["compiled"] == [True, 2], "the plain model's names, in every file"
        assert results["by hand"] == ["step_00000002"]
        assert results["counted"] == 3 * 8
    assert (
        job.output().count("nothing of it is saved: train(..., save_to=DIR) saves at the end") == 2
    )
    assert job.output().count(f"checkpoints go to {job.path}/by_hand") == 1
