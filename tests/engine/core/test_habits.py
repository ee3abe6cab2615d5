"""What people do with a Trainer, and what they find afterwards."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engine.worlds import Job, run


def test_what_people_do_with_a_trainer(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "job"), [2], {}, call="tests.engine.ordinary:habits")
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
    job = Job(str(tmp_path / "job"), [1], {}, call="tests.engine.ordinary:numbers")
    (codes,) = run(job)
    assert codes == [0], job.output()
    results = json.loads((job.path / "results_0").read_text())
    assert results["dtypes"] == ["torch.bfloat16"] * 2
    assert results["nothing counts"] == ["nan", 12, True]
    assert results["other names"] == [True, True]
    assert results["into fp16"] is True
    assert "it was saved with AdamW, this is SGD" in results["other optimizer"]
    assert results["hooked"][0] == results["hooked"][1] > 0
    assert 'say scheduler_every="epoch"' in results["by epoch"]
