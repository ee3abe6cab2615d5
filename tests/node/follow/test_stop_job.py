"""A stop in the middle of a start: the second of the two sees the first."""

import os
import signal
import socket
import subprocess
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.node.follow import stop_job
from orchestrator.node.job import cleanup
from orchestrator.node.job.processes import Process
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.server.session import Refusal, ServerSession
from orchestrator.node.start import start as node_start
from orchestrator.protocol import manifest
from orchestrator.protocol.events import Ended, EndOrder, RankState
from orchestrator.protocol.requests.follow import PortState, Stop, StopAll
from orchestrator.protocol.requests.request import STOPPED
from orchestrator.protocol.requests.start import Start
from orchestrator.protocol.requests.transfer import HANDED, Offer, RemoteDir
from tests.node.running import (
    PATIENCE,
    PYTHON,
    ROOT,
    SUPERVISE,
    Job,
    bare_spec,
    script,
    spare_others,
    spec_of,
    wait_until,
)

NewJob = Callable[..., Job]
WAITS = "import time; print('ready'); time.sleep(1000)"


@pytest.mark.slow
def test_stop_kills_after_slow_look(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.start(job.spec(script(tmp_path, WAITS)))
    wait_until(lambda: job.said("ready"))
    job.supervisor.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(stop_job, "DEATH_SECONDS", 0.0)
    order = Stop(job=job.run.job, part=job.run.part, attempt=1, why="enough", grace=0.0, wait=0.1)
    assert job.supervisor.pid in stop_job.stop_part(job.run, order).killed
    wait_until(lambda: not job.living())


ALL = StopAll(why="emergency", grace=0.0, wait=10.0)


def refused(session: ServerSession, spec: dict[str, Any]) -> bool:
    """Is a start refused because the job was stopped?"""
    try:
        session.answer(Start(spec=spec_of(spec)))
    except Refusal as refusal:
        return refusal.kind == STOPPED
    return False


@pytest.mark.slow
def test_stopped_job_never_starts(new_job: NewJob, tmp_path: Path) -> None:
    job, other = new_job(), new_job()
    spec = job.spec(script(tmp_path, WAITS))
    order = Stop(job=job.run.job, part=0, attempt=1, why="enough", grace=0.0, wait=5.0)
    receipt = stop_job.stop_part(job.run, order)
    # Without any files no end is proved.
    assert not receipt.known and not receipt.left
    assert refused(ServerSession(), spec)
    with pytest.raises(Refusal) as refusal:  # a large one, on its way
        session = ServerSession()
        session.piece += zlib.compress(manifest.pack_entries([]))
        session.answer(Offer(into=RemoteDir(kind=HANDED, job=job.run.job, part=0)))
    assert refusal.value.kind == STOPPED
    assert not list(Path(job.run.path).parent.glob("0*/*"))
    stop_job.end_part(other.run, EndOrder(why="not started", grace=0.0))
    assert refused(ServerSession(), other.spec(script(tmp_path, WAITS)))
    assert cleanup.remove_parts([(job.run.job, 0)], "/none").parts[0].problem == ""
    assert not Path(job.run.path).parent.exists()


@pytest.mark.slow
def test_stop_of_all_jobs_covers_jobs_being_started(
    home: Path, new_job: NewJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare_others(monkeypatch, set())
    job, here = new_job(), ServerSession()
    assert ServerSession().answer(ALL).receipts == ()
    assert refused(here, job.spec(script(tmp_path, WAITS)))
    ServerSession().refuse_if_stopped(job.run)  # raises nothing: this head came later


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop", "stop_all"])
def test_stop_covers_supervisor_being_started(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: Job, how: str
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
    spare_others(monkeypatch, {job.run.job})
    session, spec, results = ServerSession(), job.spec(script(tmp_path, WAITS)), []
    head = threading.Thread(target=lambda: results.append(refused(session, spec)))
    head.start()
    wait_until(reached.exists)
    if how == "stop":
        order = Stop(job=job.run.job, part=0, attempt=1, why="enough", grace=0.0, wait=5.0)
        receipt = stop_job.stop_part(job.run, order)
    else:
        (receipt,) = [r for r in ServerSession().answer(ALL).receipts if r.job == job.run.job]
    head.join(PATIENCE)
    assert results == [True]
    assert receipt.known and receipt.killed and receipt.left == ()
    (ended,) = job.of_kind("ended")
    assert ended["why"].startswith("not started") and not ended["swept"]
    assert not job.of_kind("started") and not job.living()


@pytest.mark.slow
def test_supervisor_after_stop_starts_nothing(job: Job, tmp_path: Path) -> None:
    """The stop has looked between the server's look for its mark and the supervisor's."""
    job.run.create()
    job.run.write_spec(spec_of(job.spec(script(tmp_path, WAITS))))
    job.run.forbid_start()
    words = [PYTHON, "-IS", "-c", SUPERVISE, *job.run.words]
    said = subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout
    assert b"was stopped before it had started" in said
    assert [event["event"] for event in job.events] == ["ended"]
    assert not job.living()


@pytest.mark.slow
def test_only_show_ends_nothing(
    new_job: NewJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [new_job(), new_job()]
    spare_others(monkeypatch, {job.run.job for job in jobs})
    for job in jobs:
        job.start(job.spec(script(tmp_path, WAITS)))
    for job in jobs:
        wait_until(lambda job=job: job.said("ready"))  # type: ignore[misc]
    receipts = ServerSession().answer(ALL.replace(only_show=True)).receipts
    assert {receipt.job for receipt in receipts} == {job.run.job for job in jobs}
    assert all(receipt.left and receipt.experiment == "/nowhere" for receipt in receipts)
    assert all(job.living() and not job.run.start_is_forbidden for job in jobs)
    receipts = ServerSession().answer(ALL).receipts
    assert all(receipt.ended and not receipt.left for receipt in receipts)
    assert not any(job.living() for job in jobs)


# No process has this PID.
DEAD = 2**22 - 7


def app(pid: int, used: object) -> str:
    """A line of nvidia-smi about a process that computes."""
    return f"{pid}, GPU-6c35a82c, {used}, python"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_job, "RELEASE_SECONDS", 0.2)
    # A shell needs long on a busy machine.
    monkeypatch.setattr(stop_job, "GPU_SECONDS", 60.0)
    monkeypatch.setattr(stop_job, "MACHINE_PIDS", Path("/proc/self/ns/pid").stat().st_ino)


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """nvidia-smi, saying in its own format what the test wants to hear."""

    def says(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return says


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (app(DEAD, 40518), {DEAD: "40518 MiB"}),
        # MIG and Windows' driver model report this.
        (app(DEAD, "[N/A]"), {DEAD: "some memory"}),
        (f"{app(7, 12)}\n{app(DEAD, 3)}\n{app(DEAD + 1, 5)}", {DEAD: "3 MiB"}),
        ("", {}),
        ("No running processes found", {}),
    ],
)
def test_gpu_memory_of_dead_process_is_reported(
    nvidia: Callable[[str], None], said: str, found: dict[int, str]
) -> None:
    nvidia(f"cat <<'END'\n{said}\nEND")
    assert stop_job.gpu_memory({DEAD}) == (found, "")


def test_gpu_memory_of_reused_pid_is_ignored(nvidia: Callable[[str], None]) -> None:
    nvidia(f"echo {app(os.getpid(), 512)}")
    assert stop_job.gpu_memory({os.getpid()}) == ({}, "")


def test_gpu_memory_reports_broken_driver(nvidia: Callable[[str], None]) -> None:
    nvidia("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    words = "Failed to initialize NVML: Driver/library version mismatch"
    assert stop_job.gpu_memory({DEAD}) == ({}, f"nvidia-smi ended with exit code 18: {words}")


def test_gpu_memory_in_container_is_unknown(
    nvidia: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia(f"echo {app(DEAD, 40518)}")
    monkeypatch.setattr(stop_job, "MACHINE_PIDS", 1)
    held, unknown = stop_job.gpu_memory({DEAD})
    assert not held
    assert "container" in unknown


def test_port_of_reports_state_of_master_port(home: Path) -> None:
    run = RunDir("job-x", 0)
    run.create()
    with socket.create_server(("0.0.0.0", 0)) as taken:
        number = taken.getsockname()[1]
        run.write_spec(bare_spec(port=number))
        assert stop_job.port_of(run) == PortState(number=number, free=False)
    assert stop_job.port_of(run) == PortState(number=number, free=True)
    Path(run.spec).unlink()
    # This node is not the master.
    run.write_spec(bare_spec())
    assert stop_job.port_of(run) is None
    assert stop_job.port_of(RunDir("no-such-job", 0)) is None


def ended_with(pid: int, killed: dict[int, str]) -> Ended:
    ranks = {0: RankState(state="ended", pid=pid)}
    return Ended(time=0.0, agent=0, why="", ranks=ranks, killed=killed, left=())


def test_receipt_lists_ended_and_killed(home: Path) -> None:
    gone = Process(DEAD, 1, 1, "S", "python")
    ended = ended_with(DEAD + 2, {DEAD + 1: "sleep"})
    found = stop_job.make_receipt(RunDir("job-x", 1), "enough", [gone], {}, [], ended)
    assert found.ended == {DEAD: "python"}
    assert found.killed == {DEAD + 1: "sleep"}
    assert (found.left, found.port, found.gpu_unknown) == ((), None, "")


def test_receipt_includes_what_same_stop_ended_earlier(home: Path) -> None:
    """The supervisors pass an end on among themselves: that is often faster than the head."""
    ended = ended_with(DEAD + 2, {}).replace(why="enough", lived={DEAD: "python"})
    for why, names in (("enough", {DEAD: "python"}), ("another stop, later", {})):
        assert stop_job.make_receipt(RunDir("job-x", 1), why, [], {}, [], ended).ended == names
