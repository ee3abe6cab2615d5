"""Machines that share a home see each other's jobs there, and leave them alone."""

from pathlib import Path

import pytest

from orchestrator.node.follow import stop_job
from orchestrator.node.job import job_processes
from orchestrator.node.job.run_directory import PartDir, RunDir, machine_name
from orchestrator.node.machine import probe
from orchestrator.node.server.session import ServerSession
from orchestrator.protocol.events import Ended, Started
from orchestrator.protocol.requests.follow import AskJobState, StopAll
from orchestrator.protocol.requests.start import Start
from tests.node.follow.test_stop_job import WAITS, spare_others
from tests.node.running import Job, bare_spec, run_dir, script, wait_until

# No supervisor is there to answer.
ALL = StopAll(why="emergency", grace=0.0, wait=1.0)


def started_on(machine: str, job: str, node: int = 0) -> RunDir:
    """The files of a part of a job whose processes are not here."""
    run = run_dir(job, node, machine=machine)
    run.append_event(Started(time=0.0, agent=1, supervisor=2))
    return run


def test_job_of_other_machine_is_left_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spare_others(monkeypatch, set())
    theirs, ours = started_on("gpu02 f00d", "theirs"), started_on(machine_name(), "ours")
    assert [left.job for left in probe.find_leftovers()] == ["ours"]
    assert job_processes.runs_here([theirs, ours]) == [ours]
    started_on("gpu03 f00d", "theirs", node=1)
    named = ServerSession().answer(AskJobState(job="theirs", part=0, attempt=1))
    assert (named.job, named.state) == ("theirs", "lost"), (
        "who names a part knows its machine, and has no use for the parts of a thousand others"
    )
    assert [receipt.job for receipt in stop_job.stop_all(ALL)] == ["ours"]
    assert ours.last(Ended) is not None
    assert theirs.last(Ended) is None, "it runs on"
    assert not theirs.start_is_forbidden


@pytest.mark.slow
def test_job_living_here_is_ours_after_rename_of_machine(job: Job, tmp_path: Path) -> None:
    job.start({**job.spec(script(tmp_path, WAITS)), "machine": "its-old-name f00d"})
    wait_until(lambda: job.said("ready"))
    assert job_processes.runs_here([job.run, started_on("gpu02 f00d", "theirs")]) == [job.run]


def test_started_job_records_machine(home: Path) -> None:
    spec = bare_spec(env={"ORCHESTRATOR_EXPERIMENT": "/nowhere"})
    ServerSession().answer(Start(spec=spec, later=True))
    assert PartDir("job", 0).read_spec().machine == machine_name()
