"""Common uses of a Trainer, and their results."""

import json
from pathlib import Path

import pytest

from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow


def test_trainer_supports_common_habits(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "job"), [2], {}, call="tests.engine.programs.habits:habits")
    (codes,) = run(job)
    assert codes == [0, 0], job.output()
    for rank in range(2):
        results = json.loads((job.path / f"results_{rank}").read_text())
        # Each epoch has two steps and a line of its own.
        assert results["two trainers"] == [3 * 2 + 3, 2 + 1]
        *stay, moves = results["frozen"]
        assert stay == [0.0, 0.0]
        assert moves > 0.0


def test_trainer_supports_unfreezing_and_compile(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "job"), [2], {}, call="tests.engine.programs.first_week:first_week")
    (codes,) = run(job)
    assert codes == [0, 0], job.output()
    for rank in range(2):
        results = json.loads((job.path / f"results_{rank}").read_text())
        (whole, *copies), (sharded, *_) = results["unfrozen"]
        assert copies[0] == copies[1], "what is unfrozen is summed over the ranks as well"
        assert whole == pytest.approx(sharded, abs=1e-5)
        assert "give it all of them from the start" in results["another group"]
        assert "a parameter of shape (2, 2) that is not the model's" in results["stranger"]
        assert results["compiled"] == [True, 2], "the plain model's names, in every file"
        assert results["counted"] == 3 * 8
