"""--after: what a launch waits for before it reaches its nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.config.launch import LaunchArguments, Where
from orchestrator.head.start.claims.after import is_done, wait_for_others
from orchestrator.head.start.request import resolve
from orchestrator.records import experiments
from orchestrator.records.experiment import JobRecord


def test_another_job_has_to_be_done(tmp_path: Path) -> None:
    arguments = LaunchArguments(program=("train.py",), where=Where(experiments=tmp_path))
    request = resolve(arguments, ["master_launch"])
    experiment = experiments.create(tmp_path, "first")
    name, record = experiment.name, JobRecord("first-1", "first", "running", ["x"], [], 1.0)
    for state, done in (("running", False), ("restarting", False), ("done", True)):
        experiment.write_signed(replace(record, state=state))
        assert is_done(request, name) == done
    experiment.write_signed(replace(record, state="failed"))
    with pytest.raises(CheckFailed, match=f"{name} has failed; nothing was started"):
        is_done(request, name)
    arguments = replace(arguments, launch={"after": ("first_",)})
    with pytest.raises(UsageError, match=f"no experiment 'first_' in .*did you mean '{name}'"):
        wait_for_others(resolve(arguments, ["master_launch"]))
