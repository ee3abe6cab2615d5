"""What people do with a Trainer, and what they find afterwards."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator import Trainer
from orchestrator.engine.core.checkpointing import not_taken
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
        assert results["all frozen"][0] == [8, 3]
        assert "depends on no parameter that is trained" in results["all frozen"][1]
        assert "not loss.item()" in results["detached"]
        assert "give it all of them from the start" in results["another group"]
        assert "a parameter of shape (2, 2) that is not the model's" in results["stranger"]
        assert "optimizer= is a list of 0" in results["two optimizers"]
        assert "use_reentrant=False" in results["reentrant"]
        assert results["compiled"] == [True, 2], "the plain model's names, in every file"
        assert results["dtypes"] == ["torch.float32"]
        assert results["own scheduler"] == [2, 4]
        assert results["by hand"] == ["step_00000002"]
        assert results["counted"] == 3 * 8
    assert (
        job.output().count("nothing of it is saved: train(..., save_to=DIR) saves at the end") == 2
    )
    assert job.output().count(f"checkpoints go to {job.path}/by_hand") == 1
    assert job.output().count("as saved: lr 0.1, not 0.01") == 1


def test_what_a_resume_does_not_take_of_the_program() -> None:
    def of(lr: float, total: int, last: int) -> dict[str, Any]:
        group = {"lr": lr, "betas": (0.9, 0.99), "fused": True}
        return {
            "optimizer": [group, group],
            "scheduler": {"total_steps": total, "_last": last, "phases": [[total]]},
        }

    saved = json.loads(json.dumps(of(0.1, 6, 3)))
    assert not_taken(saved, of(0.1, 6, 0)) == ""
    assert not_taken(saved, of(1e-05, 9, 0)) == "lr 0.1, not 1e-05, total_steps 6, not 9, phases"
    assert not_taken(None, of(1e-05, 9, 0)) == "", "an earlier version did not say"
    assert not_taken(saved, of(0.1, 6, 0) | {"scheduler": None}) == ""


def test_each_argument_of_train_does_something_alone_or_is_refused(tmp_path: Path) -> None:
    by_hand = {"ORCHESTRATOR_EXPERIMENT": ""}
    call = "tests.engine.programs.habits:arguments"
    job = Job(str(tmp_path / "job"), [1], {}, env=by_hand, call=call)
    assert run(job) == [[0]], job.output()
    results = json.loads((job.path / "results_0").read_text())
    refused = {name: results.pop(name) for name in ("patience", "keep", "scheduler_every")}
    assert {name: result[0] for name, result in results.items()} == {
        **dict.fromkeys(results, 2), "epochs": 4, "min_period": 4, "max_period": 1,
    }  # fmt: skip
    assert [name for name, result in results.items() if result[1]] == ["val_loader"]
    saved = {name: len(result[2]) for name, result in results.items() if result[2]}
    assert saved == {"save_every": 2, "best": 1, "save_to": 1}
    assert results["save_to"][2] == ["here/step_00000002"]
    assert "nothing to resume from" in results["resume"][3][0]
    assert [name for name, result in results.items() if not result[4]] == ["verbose"]
    assert "no metric is named" in refused["patience"]
    assert "keep=1 says how many checkpoints stay, but none is saved" in refused["keep"]
    assert "say scheduler=, or leave scheduler_every= out" in refused["scheduler_every"]
    known = {*inspect.signature(Trainer.train).parameters} - {"self", "train_loader"}
    assert known == {*results, *refused} - {"scheduler_every"}
