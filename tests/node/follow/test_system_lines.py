"""The log lines of a job's supervisors on a node."""

import time
from pathlib import Path

import pytest

from orchestrator.node.job.run_directory import RunDir, SystemLog
from orchestrator.node.server.session import ServerSession
from orchestrator.protocol.requests.follow import AskSystem


@pytest.mark.parametrize("ahead", [0.0, 3600.0, -3600.0])
def test_system_lines_are_found_with_any_clock(
    ahead: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path))
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + ahead)
    run = RunDir("job", 0)
    run.create()
    SystemLog(run.system).line("starts")
    asked = AskSystem(job="job", part=0, since=60.0, until=-60.0)
    answer = ServerSession().answer(asked)
    assert "starts" in answer.supervisor  # type: ignore[attr-defined]
    assert not ServerSession().answer(asked.replace(until=30.0)).supervisor  # type: ignore[attr-defined]
