"""Shared memory of killed processes is removed; the rest of /dev/shm stays."""

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.node.follow import stop_job
from orchestrator.node.job import job_processes, processes
from orchestrator.node.job.job_processes import Segments
from orchestrator.node.job.processes import Process
from orchestrator.protocol.requests.follow import Stop
from tests.node.running import Job, script, wait_until

SHM = Path("/dev/shm")
SHARES = """
import os, signal, sys, time
from multiprocessing import shared_memory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
made = shared_memory.SharedMemory(sys.argv[1] + os.environ["RANK"], create=True, size=1 << 20)
made.buf[:4] = b"data"
print("ready", flush=True)
time.sleep(1000)
"""
MAPS = """
import mmap, sys, time
with open(sys.argv[1], sys.argv[2]) as file:
    access = mmap.ACCESS_WRITE if "+" in sys.argv[2] else mmap.ACCESS_READ
    held = mmap.mmap(file.fileno(), 4096, access=access)
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{os.getpid()}-{time.monotonic_ns()}-"
    yield name
    for path in SHM.glob(f"{name}*"):
        path.unlink()


def left(name: str) -> list[str]:
    return [path.name for path in SHM.glob(f"{name}*")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("supervisor", "trackers"), [("runs", True), ("is killed", False), ("is stopped", False)]
)
def test_killed_job_leaves_no_shared_memory(
    job: Job, tmp_path: Path, name: str, supervisor: str, trackers: bool
) -> None:
    job.start(job.spec({**script(tmp_path, SHARES), "args": [name]}, nproc=2))
    wait_until(lambda: job.said("ready", "0") and job.said("ready", "1"))
    assert len(left(name)) == 2
    if not trackers:
        for pid in job.living():
            if "resource_tracker" in " ".join(processes.command_line_of(pid)):
                os.kill(pid, signal.SIGKILL)
    if supervisor != "runs":
        number = signal.SIGKILL if supervisor == "is killed" else signal.SIGSTOP
        job.supervisor.send_signal(number)
    order = Stop(job=job.run.job, part=0, attempt=1, why="enough", grace=0.0, wait=3.0)
    receipt = stop_job.stop_part(job.run, order)
    assert not receipt.left and receipt.shared_memory == ()
    assert left(name) == [] and not job.living()


@pytest.mark.slow
def test_segment_mapped_by_other_process_is_named(job: Job, tmp_path: Path, name: str) -> None:
    job.start(job.spec({**script(tmp_path, SHARES), "args": [name]}))
    wait_until(lambda: job.said("ready"))
    path = SHM / f"{name}0"
    for pid in job.living():
        if "resource_tracker" in " ".join(processes.command_line_of(pid)):
            os.kill(pid, signal.SIGKILL)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        order = Stop(job=job.run.job, part=0, attempt=1, why="enough", grace=0.0, wait=5.0)
        assert stop_job.stop_part(job.run, order).shared_memory == (str(path),)
        assert path.exists()
        assert job.events[-1]["shared_memory"] == [str(path)]


def killed(path: Path, mode: str, segments: Segments) -> None:
    """Start a process that maps the file, and kill it."""
    words = [sys.executable, "-c", MAPS, str(path), mode]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        process = processes.find_process(child.pid)
        assert isinstance(process, Process)
        segments.note([process])
        child.kill()


def written_by_a_job(name: str, mode: int) -> tuple[Path, Segments]:
    """Return a file that a job's process had open for writing when it was killed."""
    path, segments = SHM / f"{name}set", Segments()
    path.write_bytes(bytes(4096))
    path.chmod(mode)
    segments.since = time.time() - 10.0
    killed(path, "r+b", segments)
    return path, segments


@pytest.mark.parametrize("mode", ["rb", "r+b"])
@pytest.mark.parametrize("when", ["before the job", "by the job"])
def test_segments_not_made_by_job_are_kept(name: str, when: str, mode: str) -> None:
    path, segments = SHM / f"{name}set", Segments()
    path.write_bytes(bytes(4096))
    path.chmod(0o600)
    if when == "before the job":
        time.sleep(0.1)
    else:
        segments.since = time.time() - 10.0
    killed(path, mode, segments)
    assert segments.remove() == ()
    assert path.exists() is not (when == "by the job" and mode == "r+b")


def test_shared_segment_is_kept_if_processes_are_hidden(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, segments = written_by_a_job(name, 0o666)
    monkeypatch.setattr(job_processes, "in_use", lambda _: (set(), True))
    assert segments.remove() == (str(path),)
    path.chmod(0o600)
    assert segments.remove() == ()


def test_segment_of_other_user_is_named_and_kept(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, segments = written_by_a_job(name, 0o600)
    monkeypatch.setattr(job_processes.os, "getuid", lambda: 12345)
    assert segments.remove() == (str(path),)
