"""What a notebook shows of a job that is on this disk."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from orchestrator.api.job import Job
from orchestrator.config.launch import Where
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.metrics.trainers import file_name
from orchestrator.records.outcome import Verdict


def job(path: Path, state: str, **fields: object) -> Job:
    (path / "outputs").mkdir(parents=True, mode=0o700)
    experiment = Experiment(path)
    experiment.write_record(JobRecord("r", str(path), state, ["m"], [], 1000.0, **fields))  # type: ignore[arg-type]
    return Job(experiment, Where(experiments=path.parent))


def test_the_steps_of_a_job_are_a_table(tmp_path: Path) -> None:
    ended = job(tmp_path / "run_20260101_000000", "done", ended=1001.0, exit_code=0)
    assert ended.metrics() == [] and str(ended.metrics()) == ""
    lines = [{"time": 1.0, "loss": 1 / step, "step": step, "name": "x"} for step in range(1, 31)]
    text = "".join(json.dumps(line) + "\n" for line in [{"event": "begin"}, *lines])
    (ended.directory / "outputs" / file_name(0)).write_text(text)
    rows = ended.metrics()
    assert rows.columns[:2] == ["step", "loss"] and len(rows) == 30
    assert (rows[3]["step"], rows[3]["loss"]) == (4, 0.25)
    assert str(rows).splitlines()[-1].split()[:2] == ["30", "0.0333333"]
    assert rows._repr_html_().count("<tr>") == 21
    assert "step 30 · loss 0.03333" in ended._repr_html_()


def test_a_cell_that_waits_shows_how_far_the_job_is_and_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    handle = types.SimpleNamespace(update=shown.append)
    display = types.SimpleNamespace(HTML=str, display=lambda *_, **__: handle)
    shell = types.SimpleNamespace(kernel=object())
    ipython = types.SimpleNamespace(display=display, get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    cause = Verdict(kind="exception", message="KeyError: '<b>'", node=0, node_name="n", rank=1)
    failed = job(tmp_path / "run_20260101_000001", "failed", ended=1.0, exit_code=1, verdict=cause)
    assert failed.wait() == 1
    assert "failed</b>" in shown[-1] and "KeyError: &#x27;&lt;b&gt;&#x27;" in shown[-1]
