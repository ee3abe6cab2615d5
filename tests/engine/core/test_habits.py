"""What people do with a Trainer, and what they find afterwards."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engine.worlds import Job, run


def test_what_people_do_with_a_trainer(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "job"), [2], {}, call="tests.engine.ordinary:habits")
    (codes,) = run(job)
    assert codes == [0, 0], job.told()
    for rank in range(2):
        told = json.loads((job.path / f"told_{rank}").read_text())
        assert told["two trainers"] == [3 * 2 + 3, 2 + 1]  # two steps an epoch, and its own line
        *stay, moves = told["frozen"]
        assert stay == [0.0, 0.0]
        assert moves > 0.0
        assert told["exported"] == []
        assert max(told["kept open"]) < 4  # each of four directories took 3 threads and 5 files
        assert told["at home"] == [True, True, False]


def test_numbers_and_checkpoints_of_a_trainer(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "job"), [1], {}, call="tests.engine.ordinary:numbers")
    (codes,) = run(job)
    assert codes == [0], job.told()
    told = json.loads((job.path / "told_0").read_text())
    assert told["dtypes"] == ["torch.bfloat16"] * 2
    assert told["nothing counts"] == ["nan", 12, True]
    assert told["other names"] == [True, True]
    assert told["into fp16"] is True
    assert "it was saved with AdamW, this is SGD" in told["other optimizer"]
    assert told["hooked"][0] == told["hooked"][1] > 0
    assert 'say scheduler_every="epoch"' in told["by epoch"]
