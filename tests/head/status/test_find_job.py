"""The experiment that a command without a name uses."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import Where
from orchestrator.head.status.status import find_job
from orchestrator.records.experiment import Experiment, Untrusted, this_head
from tests.records.test_experiment import record


def launched(root: Path, day: int, state: str = "done") -> Path:
    path = root / f"run_202601{day:02d}_000000"
    path.mkdir(parents=True, mode=0o700)
    experiment = Experiment(path)
    begun = replace(record(), state=state, job=path.name, part_of=2, head=this_head())
    (experiment.write_record if state == "done" else experiment.write_signed)(begun)
    return path


def test_find_job_refuses_untrusted_newest_job(tmp_path: Path) -> None:
    launched(tmp_path, 1)
    launched(tmp_path, 2).chmod(0o777)
    where = Where(experiments=tmp_path)
    with pytest.raises(Untrusted, match="may be written by everybody"):
        find_job(where, None)
    assert find_job(where, "run_20260101_000000").record.job == "run_20260101_000000"
    assert find_job(replace(where, trust_record=True), None).record.job == "run_20260102_000000"


def test_find_job_prefers_running_job(tmp_path: Path) -> None:
    """Else a stop without a name ends nothing while a job runs, or one of several by chance."""
    where = Where(experiments=tmp_path)
    heads = [Experiment(launched(tmp_path, day, "running")) for day in (1, 2)]
    launched(tmp_path, 3)
    assert heads[0].lock() is None
    assert find_job(where, None).record.job == heads[0].name
    assert heads[1].lock() is None
    with pytest.raises(UsageError, match=f"2 jobs run:\n  {heads[0].name}\n  {heads[1].name}"):
        find_job(where, None)
    assert find_job(where, heads[0].name).record.job == heads[0].name


def test_find_job_ignores_running_record_without_head(tmp_path: Path) -> None:
    """A head was killed: it never wrote that its job ended. The nodes know."""
    stale = Experiment(launched(tmp_path, 1, "running"))
    assert find_job(Where(experiments=tmp_path), None).record.job == stale.name
    newest = launched(tmp_path, 2)
    assert find_job(Where(experiments=tmp_path), None).record.job == newest.name


def test_trust_record_holds_for_one_command(tmp_path: Path) -> None:
    """Its results are pickles, and read only of what this login launched."""
    path = launched(tmp_path / "experiments", 1)
    where = Where(experiments=tmp_path / "experiments")
    seen = Experiment(path).read_record()
    find_job(where, None)
    assert not Experiment(path).is_launched_here(seen)
    find_job(replace(where, trust_record=True), None)
    assert Experiment(path).is_launched_here(seen)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_find_job_skips_experiment_of_other_user(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launched(tmp_path, 1)
    os.chown(launched(tmp_path, 2), 12345, 12345)
    assert find_job(Where(experiments=tmp_path), None).record.job == "run_20260101_000000"
    assert "run_20260102_000000 is skipped: it belongs to user 12345" in capfd.readouterr().err
