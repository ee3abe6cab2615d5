"""A stop in the middle of a start: whoever comes second sees the other."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.head.saved.bring import Parcel
from orchestrator.node.job import cleanup, processes, stop_job
from orchestrator.node.server.visit import Refusal, Visit
from orchestrator.node.start import start as node_start
from orchestrator.protocol.events import Ended
from orchestrator.protocol.requests.follow import Stop, StopAll
from orchestrator.protocol.requests.request import STOPPED
from orchestrator.protocol.requests.start import Start
from tests.node.running import PATIENCE, PYTHON, ROOT, SUPERVISE, Job, script, spec_of, wait_until

NewJob = Callable[..., Job]
WAITS = "import time; print('ready'); time.sleep(1000)"


def spare_others(monkeypatch: pytest.MonkeyPatch, ours: set[str]) -> None:
    """Hide the jobs that really run here."""
    tagged = processes.tagged_jobs
    monkeypatch.setattr(
        processes, "tagged_jobs", lambda: {job for job in tagged() if job.job in ours}
    )


ALL = StopAll(why="emergency", grace=0.0, wait=10.0)


def refused(session: Visit, spec: dict[str, Any]) -> bool:
    """Is a start refused because the job was stopped?"""
    try:
        session.answer(Start(spec=spec_of(spec)))
    except Refusal as refusal:
        return refusal.kind == STOPPED
    return False


def test_what_was_stopped_first_never_starts(new_job: NewJob, tmp_path: Path) -> None:
    job, other = new_job(), new_job()
    spec = job.spec(script(tmp_path, WAITS))
    order = Stop(job=job.run.job, node=0, why="enough", grace=0.0, wait=5.0)
    receipt = stop_job.stop(job.run, order)
    assert not receipt.known and not receipt.left  # nothing was there, so nothing is proved
    assert refused(Visit(), spec)
    with pytest.raises(Refusal) as refusal:  # a large one, on its way
        Visit().answer(Parcel(job=job.run.job, node=0, name="call.pkl"))
    assert refusal.value.kind == STOPPED
    assert not list(Path(job.run.path).parent.glob("0*/*"))
    stop_job.end(other.run, "not started", 0.0)
    assert refused(Visit(), other.spec(script(tmp_path, WAITS)))
    assert cleanup.remove([(job.run.job, 0)], "/none").runs[0].problem == ""
    assert not Path(job.run.path).parent.exists()


def test_a_stop_of_all_jobs_is_one_of_those_that_are_on_their_way(
    home: Path, new_job: NewJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare_others(monkeypatch, set())
    job, here = new_job(), Visit()
    assert Visit().answer(ALL).receipts == ()
    assert refused(here, job.spec(script(tmp_path, WAITS)))
    Visit().refuse_if_stopped(job.run)  # raises nothing: this head came later


@pytest.mark.parametrize("how", ["stop", "stop_all"])
def test_a_stop_while_a_slow_node_starts_its_supervisor(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, new_job: NewJob, how: str
) -> None:
    """It is known by its command line alone: it has opened nothing yet."""
    library = tmp_path / "library"
    library.mkdir()
    reached, go = tmp_path / "reached", tmp_path / "go"
    os.mkfifo(go)
    (library / "__main__.py").write_text(
        f"import sys; open({str(reached)!r}, 'w'); open({str(go)!r}).read()\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from orchestrator.node.main import main; main()\n"
    )
    monkeypatch.setattr(node_start, "LIBRARY", str(library))
    job = new_job()
    spare_others(monkeypatch, {job.run.job})
    session, spec, results = Visit(), job.spec(script(tmp_path, WAITS)), []
    head = threading.Thread(target=lambda: results.append(refused(session, spec)))
    head.start()
    wait_until(reached.exists)
    if how == "stop":
        order = Stop(job=job.run.job, node=0, why="enough", grace=0.0, wait=5.0)
        receipt = stop_job.stop(job.run, order)
    else:
        (receipt,) = [r for r in Visit().answer(ALL).receipts if r.job == job.run.job]
    head.join(PATIENCE)
    assert results == [True]
    assert receipt.known and receipt.killed and receipt.left == ()
    (ended,) = job.of_kind("ended")
    assert ended["why"].startswith("not started") and not ended["swept"]
    assert not job.of_kind("started") and not job.living()


def test_a_supervisor_that_comes_after_a_stop_starts_nothing(
    new_job: NewJob, tmp_path: Path
) -> None:
    """The stop has looked between the server's look for its mark and the supervisor's."""
    job = new_job()
    job.run.create()
    job.run.write_spec(spec_of(job.spec(script(tmp_path, WAITS))))
    job.run.forbid_start()
    words = [PYTHON, "-IS", "-c", SUPERVISE, job.run.job, "0"]
    said = subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout
    assert b"was stopped before it had started" in said
    assert [event["event"] for event in job.events] == ["ended"]
    assert not job.living()


def test_half_an_event_spoils_no_other(new_job: NewJob, tmp_path: Path) -> None:
    """A full disk took the rest of a line, then its supervisor was killed."""
    job = new_job()
    job.start(job.spec(script(tmp_path, WAITS)))
    wait_until(lambda: job.said("ready"))
    assert job.supervisor is not None
    job.supervisor.kill()
    job.supervisor.wait()
    with Path(job.run.events).open("ab") as file:
        file.write(b'{"event": "rank_st')
    order = Stop(job=job.run.job, node=0, why="enough", grace=0.0, wait=5.0)
    assert stop_job.stop(job.run, order).left == ()
    last = job.run.last(Ended)
    assert last is not None and last.swept
