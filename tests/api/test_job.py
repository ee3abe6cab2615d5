"""A program reads the state of a job whose experiment is on the local disk."""

import json
from pathlib import Path

from orchestrator.api.job import Job
from orchestrator.config.launch import Where
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.metrics.trainers import file_name


def test_metrics_has_row_per_step(tmp_path: Path) -> None:
    path = tmp_path / "run_20260101_000000"
    (path / "outputs").mkdir(parents=True, mode=0o700)
    experiment = Experiment(path)
    experiment.write_record(
        JobRecord("r", str(path), "done", ["m"], [], 1000.0, ended=1001.0, exit_code=0)
    )
    ended = Job(experiment, Where(experiments=tmp_path))
    assert ended.metrics() == []
    lines = [{"time": 1.0, "loss": 1 / step, "step": step, "name": "x"} for step in range(1, 31)]
    text = "".join(json.dumps(line) + "\n" for line in [{"event": "begin"}, *lines])
    (path / "outputs" / file_name(0)).write_text(text)
    rows = ended.metrics()
    assert len(rows) == 30
    assert (rows[3]["step"], rows[3]["loss"]) == (4, 0.25)
