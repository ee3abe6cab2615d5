"""A mean counts the rows that came, and models that only hold others train like any other."""

import json
from pathlib import Path

import pytest

from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_collation_trains_as_plain_loop(tmp_path: Path, ranks: int) -> None:
    job = Job(str(tmp_path / "job"), [ranks], {}, call="tests.engine.programs.rows:rows")
    (codes,) = run(job)
    assert codes == [0] * ranks, job.output()
    for rank in range(ranks):
        results = json.loads((job.path / f"results_{rank}").read_text())
        # The ways to collate, and two containers, which several ranks train in shards as well.
        assert len(results) == 4 + 2 * ranks
        for name, difference in results.items():
            assert isinstance(difference, float) and difference < 1e-5, (name, difference)
