"""The list of jobs, read without a node."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.launch import Launch, Where
from orchestrator.head.commands.ls import list_jobs
from orchestrator.head.commands.sweep import journal
from orchestrator.head.screen import output
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord
from orchestrator.records.metrics.trainers import file_name
from orchestrator.records.outcome import JobVerdict

NODES = [NodeRecord(0, "gpu1", "gpu1", None, None, "10.0.0.1", "python3", 0, 8)]
NAMES = [f"run_20260101_00000{number}" for number in range(3)]


def experiment(root: Path, name: str, state: str, **fields: object) -> Experiment:
    path = root / name
    (path / "outputs").mkdir(parents=True, mode=0o700)
    (path / "logs").mkdir()
    record = JobRecord(name, str(path), state, ["master_launch"], NODES, time.time() - 60, **fields)  # type: ignore[arg-type]
    found = Experiment(path)
    found.write_record(record)
    return found


def listed(root: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> list[str]:
    chosen: dict[str, Any] = {"running": False, "every": False, **options}
    assert list_jobs(Where(experiments=root), **chosen) == 0
    return capsys.readouterr().out.splitlines()


def test_ls_prints_line_per_job_newest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert listed(tmp_path, capsys) == [f"there is no job in {tmp_path}"]
    cause = JobVerdict(kind="exception", message="KeyError: 'labels'\nmore")
    ended = {"ended": time.time(), "exit_code": 1}
    experiment(tmp_path, NAMES[0], "failed", verdict=cause, **ended)
    runs = experiment(tmp_path, NAMES[1], "running", engine=False, program=["a b.py", "--lr=1"])
    step = {"step": 214, "steps": 1740, "loss": 0.016, "step_ms": 300, "left_s": 458}
    (runs.path / "outputs" / file_name(0)).write_text(json.dumps(step) + "\n")
    damaged = experiment(tmp_path, NAMES[2], "done", **ended)
    (damaged.path / "job.json").write_text("{")
    # A head that follows the job holds this lock.
    assert runs.lock() is None
    heading, third, second, first = listed(tmp_path, capsys)
    assert heading.split()[:6] == ["JOB", "STATE", "STEP", "LOSS", "LEFT", "NODES"]
    assert third.startswith(f"{NAMES[2]}  damaged")
    assert second.split()[:5] == [NAMES[1], "running", "214/1740", "0.016", "7"]
    assert second.endswith("  'a b.py' --lr=1") and heading.split()[-2:] == ["COMMAND", "NOTE"]
    assert first.split()[:6] == [NAMES[0], "failed", "-", "-", "-", "1"]
    assert first.endswith("KeyError: 'labels'")
    os.utime(runs.path / "outputs" / file_name(0), (time.time() - 100,) * 2)
    assert "running, no step for 1 min 4" in listed(tmp_path, capsys)[2]
    with output.json_alone():
        (row,) = json.loads("\n".join(listed(tmp_path, capsys, running=True)))
    assert (row["name"], row["ranks"], row["progress"]["step"]) == (NAMES[1], 8, 214)
    runs.unlock()


def test_ls_limits_list_to_newest_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(22):
        name = f"run_20260101_0000{number:02d}"
        experiment(tmp_path, name, "done", ended=time.time(), exit_code=0)
    lines = listed(tmp_path, capsys)
    assert len(lines) == 22 and lines[-1] == "and 2 older jobs: orchestrator ls --all"
    assert lines[1].startswith("run_20260101_000021")
    assert len(listed(tmp_path, capsys, every=True)) == 23


def test_ls_filters_by_all_given_tags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, tags in zip(NAMES, (["a"], ["a", "b"], []), strict=True):
        launch = Launch(tag=tuple(tags))
        experiment(tmp_path, name, "done", ended=time.time(), exit_code=0, launch=launch)
    assert [line.split()[0] for line in listed(tmp_path, capsys, tags=["a"])[1:]] == NAMES[1::-1]
    assert [line.split()[0] for line in listed(tmp_path, capsys, tags=["a", "b"])[1:]] == NAMES[1:2]
    assert listed(tmp_path, capsys, tags=["c"]) == [f"there is no job tagged c in {tmp_path}"]


def test_ls_of_a_sweep_has_values_as_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = journal.create_journal(tmp_path, "sweep", journal.About(count=2))
    for number, rate in enumerate(("1e-3", "1e-4")):
        launch = Launch(tag=("a", sweep.name), note=f"lr={rate}")
        experiment(tmp_path, f"sweep-{number}_20260101_00000{number}", "running", launch=launch)
        sweep.add(journal.MemberState(number, values={"lr": rate}))
    heading, *rows = listed(tmp_path, capsys, tags=[sweep.name])
    at = heading.split().index("lr")
    assert [row.split()[at] for row in rows] == ["1e-4", "1e-3"]
