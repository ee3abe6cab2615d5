"""`orchestrator watch`: one watcher for each job, and a unit that systemd understands."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from orchestrator.config.launch import Where
from orchestrator.head.commands import follow
from orchestrator.records.experiment import Experiment, JobRecord


def test_the_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / 'a b"%h$HOME' / "experiments"
    place = root / "train_20260101_000000"
    place.mkdir(parents=True)
    record = JobRecord(
        job="j", experiment=str(place), state="running", command=[], nodes=[], started=1.0
    )
    Experiment(place).write_record(record)
    assert follow.print_unit(Where(experiments=root), None) == 0
    text = capsys.readouterr().out
    assert (
        f"WorkingDirectory={tmp_path}/a b" in text and "%%h$HOME\n" in text and "%%h$$HOME" in text
    )
    assert '/orchestrator" "watch" "' in text and "-m" not in text  # whose directory comes first
    analyze = shutil.which("systemd-analyze")
    if analyze:
        unit = tmp_path / "watch.service"
        unit.write_text(text)
        words = [analyze, "verify", "--user", str(unit)]
        checked = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
        assert "watch.service:" not in checked.stderr, checked.stderr
