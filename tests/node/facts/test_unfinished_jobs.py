from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from orchestrator.node.facts import unfinished_jobs
from orchestrator.node.job.run_directory import RunDir
from orchestrator.protocol.facts import Leftover


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path))
    return tmp_path


def run(job: str, *events: str, spec: bool = True) -> RunDir:
    made = RunDir(job, 0)
    made.create()
    if spec:
        Path(made.spec).write_text("{}")
    fields = {
        "started": {"agent": 1, "supervisor": 2},
        "ended": {"agent": 0, "why": "", "ranks": {}, "killed": {}, "left": []},
    }
    lines = [json.dumps({"event": event, "time": 0.0, **fields[event]}) for event in events]
    Path(made.events).write_text("\n".join(lines))
    return made


def test_none() -> None:
    assert unfinished_jobs.leftovers() == ()


def test_those_that_have_not_ended() -> None:
    run("over-1", "started", "ended")
    run("never-1", spec=False)  # it was never given anything to run
    run("lost-1", "started")
    alive = run("alive-1", "started")
    with socket.socket(socket.AF_UNIX) as supervisor:
        supervisor.bind(alive.socket)
        supervisor.listen()
        found = unfinished_jobs.leftovers()
    assert sorted(found, key=lambda leftover: leftover.job) == [
        Leftover(job="alive-1", node=0, alive=True),
        Leftover(job="lost-1", node=0, alive=False),
    ]


def test_of_many_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfinished_jobs, "NEWEST", 3)
    for number in range(5):
        run(f"job-{number}", "started")
    assert len(unfinished_jobs.leftovers()) == 3
