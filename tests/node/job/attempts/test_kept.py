"""What a later attempt could go on from, as its node sees it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.node.job.attempts import kept
from orchestrator.node.job.run_directory import RunDir
from tests.node.start.test_next_spec import FIRST

CHECKPOINT = "experiment/outputs/checkpoints/step_00000007"


@pytest.mark.parametrize(
    ("files", "at"),
    [
        ({}, 0.0),
        ({"memory/mine.bin": 20.0}, 20.0),  # a script's own
        ({"memory/script.0.0": 20.0, "memory/script.0.1": 30.0}, 30.0),
        ({"memory/trainer1.0.0": 20.0}, 20.0),
        ({CHECKPOINT: 40.0, "memory/script.0.0": 20.0}, 40.0),
        ({"experiment/outputs/checkpoints/.step_00000007.1a.partial": 40.0}, 0.0),
        ({"experiment/outputs/weights.pt": 40.0}, 0.0),
    ],
)
def test_what_is_there(
    files: dict[str, float], at: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))
    for name, when in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (when, when))
    run = RunDir("e-abc", 0)
    run.create()
    own = {
        "ORCHESTRATOR_RESUME_DIR": str(tmp_path / "memory"),
        "ORCHESTRATOR_EXPERIMENT": str(tmp_path / "experiment"),
    }
    run.write_spec(FIRST.replace(env=own))
    assert kept.last(run) == at
    other = RunDir("e-abc", 1)  # without either directory
    other.create()
    other.write_spec(FIRST.replace(env={}))
    assert kept.last(other) == 0.0
