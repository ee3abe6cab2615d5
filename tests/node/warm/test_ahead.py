"""A supervisor that is started ahead, for who is next in the queue."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.node.job.job_processes import supervised
from orchestrator.node.server.visit import Visit
from orchestrator.node.start.claims import Claims
from orchestrator.node.warm import ahead as module
from orchestrator.node.warm.ahead import Ahead
from orchestrator.protocol.requests.claims import WAITING, Entry
from orchestrator.protocol.requests.start import ReadBook, Wait
from tests.clusters.library import compiled
from tests.node.running import Job, alive, spec_of, wait_until

SAYS = "import os, sys; print('hello'); print(os.environ['LOCAL_RANK'], file=sys.stderr)"


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIBRARY", str(compiled()))


def test_it_becomes_the_supervisor_of_a_job(new_job: Callable[..., Job], tmp_path: Path) -> None:
    job, visit = new_job(), Visit()
    (tmp_path / "says.py").write_text(SAYS)
    ahead = visit.of(Ahead)
    ahead.start()
    job.run.create()
    target = {"kind": "script", "name": str(tmp_path / "says.py"), "args": []}
    job.run.write_spec(spec_of(job.spec(target)))
    with (tmp_path / "errors").open("wb") as errors:
        taken = ahead.take(job.run, [errors.fileno()])
    assert taken is not None
    with taken.stdout:
        assert taken.stdout.readline() == b"ready\n"
    assert supervised(taken.pid) == (job.run.job, "0") or not alive(taken.pid)
    visit.leave()  # whose job goes on
    wait_until(lambda: job.of_kind("ended"))
    assert job.ended() == {0: 0} and job.output["0"].splitlines() == ["hello", "0"]
    assert visit.supervisor is not None and visit.supervisor.wait() == 0
    assert ahead.take(job.run, [0]) is None  # there is one


def test_without_a_job_it_ends_with_its_visit() -> None:
    visit = Visit()
    ahead = visit.of(Ahead)
    assert ahead.take(Job(Path("/"), "none").run, [0]) is None
    ahead.start()
    assert ahead.process is not None
    visit.leave()
    assert ahead.process.wait(30) == 0


def test_one_that_was_killed_is_not_taken(new_job: Callable[..., Job]) -> None:
    visit = Visit()
    visit.of(Ahead).start()
    process = visit.of(Ahead).process
    assert process is not None
    process.kill()
    process.wait()
    assert visit.of(Ahead).take(new_job().run, [sys.stderr.fileno()]) is None


def test_only_who_is_next_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_CLAIMS", str(tmp_path / "claims"))
    visits = [Visit(), Visit()]
    try:
        for number, visit in enumerate(visits):
            entry = Entry(
                id=f"{number}" * 16, state=WAITING, job="j", since=1.0, order=2.0 - number
            )
            visit.answer(Wait(entry=entry))
        for visit in visits:
            visit.answer(ReadBook())
        started = [visit.of(Ahead).process is not None for visit in visits]
        assert started == [False, True] and all(visit.of(Claims).entry for visit in visits)
    finally:
        for visit in visits:
            visit.leave()
    assert [path.name for path in (tmp_path / "claims").iterdir()] == ["locks"]
