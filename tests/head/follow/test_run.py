"""What a head writes into the record when a job ends."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from orchestrator.head.follow.job_end import Outcome
from orchestrator.head.follow.run import Run
from orchestrator.head.screen.display import Display
from orchestrator.head.screen.screen import Screen
from orchestrator.head.status.backend import backend_of
from orchestrator.records import experiment
from orchestrator.records.experiment import JobRecord


@pytest.mark.parametrize(("out_of_time", "written"), [(True, "running"), (False, "stopped")])
def test_a_job_that_may_be_queued_again_is_not_said_to_be_over(
    out_of_time: bool, written: str, tmp_path: Path
) -> None:
    """Whoever follows the record from another machine leaves a job that is over."""
    directory = experiment.create(tmp_path, "run")
    record = JobRecord(
        "run-1", str(directory.path), "running", ["master_launch"], [], 1000.0, {}, batch=True
    )
    directory.write_record(record)
    screen = Screen([], io.StringIO(), tty=False, color=False, quiet=True)
    run = Run(directory, record, Display(screen), backend_of(record))
    run.end.outcome, run.out_of_time = Outcome.STOPPED, out_of_time
    run.conclude()
    assert directory.read_record().state == written
    assert (run.record.state, run.record.exit_code) == ("stopped", 130)
    assert run.stopped_in_time is out_of_time
