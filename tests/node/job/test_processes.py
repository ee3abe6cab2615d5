"""On real processes. Each test has a job name of its own, so that tests may run side by side."""

import contextlib
import errno
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.node.job import processes
from orchestrator.node.job.job_processes import JobProcesses, Tagged, processes_of_job, tagged_jobs
from orchestrator.node.job.processes import Process, error_in_words, find_process, send_signal
from orchestrator.node.job.run_directory import PartDir
from tests.node.running import PYTHON, alive, wait_until

SLEEP = ["sleep", "1000"]
Start = Callable[..., int]


@pytest.fixture
def job() -> str:
    return f"job-{os.getpid()}-{time.monotonic_ns()}"


@pytest.fixture
def start() -> Iterator[Start]:
    """start(job, node, command...): a process with the tags of a job, and nothing else."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(job: str, node: int, *command: str, **env: str) -> int:
        tags = {"ORCHESTRATOR_JOB": job, "ORCHESTRATOR_RUN": f"/x/runs/{job}/{node}/2"}
        tags = {**tags, "PATH": os.environ["PATH"], **env}
        running.append(subprocess.Popen(command or SLEEP, env=tags, start_new_session=True))
        pid = running[-1].pid
        # Between fork and exec it still has the test's own environment.
        wait_until(lambda: f"ORCHESTRATOR_JOB={job}".encode() in processes.environment_of(pid))
        return pid

    yield begin
    for process in running:
        for found in processes.find_descendants(processes.all_processes(), {process.pid}):
            # The child ended with its parent.
            with contextlib.suppress(ProcessLookupError):
                os.kill(found, signal.SIGKILL)
        process.kill()
        process.wait()


def pids(job: str, node: int = 0, supervisor: int = 0) -> set[int]:
    return {process.pid for process in JobProcesses(PartDir(job, node), supervisor).members()}


def process(pid: int) -> Process:
    found = find_process(pid)
    assert found is not None
    return found


def test_members_need_exact_tags(job: str, start: Start) -> None:
    ours = {start(job, 0), start(job, 0)}
    # This is another job of the same user whose name begins with ours.
    start(job + "1", 0)
    start(job[:-1], 0)
    # This is the same job on a node that shares this machine.
    start(job, 1)
    start(job, 10)
    start("x", 0, MY_ORCHESTRATOR_JOB=job, OTHER=f"ORCHESTRATOR_JOB={job}")
    words = f"import time; time.sleep(1000)  # torchrun ORCHESTRATOR_JOB={job} NODE_RANK=0"
    start("x", 0, PYTHON, "-c", words)
    assert pids(job) == ours
    assert pids(job, 1) != ours


def test_shell_with_pasted_exports_is_no_member(job: str) -> None:
    env = {**os.environ, "ORCHESTRATOR_JOB": job, "NODE_RANK": "0"}
    env.pop("ORCHESTRATOR_RUN", None)
    with subprocess.Popen(SLEEP, env=env) as shell:
        tags = {f"ORCHESTRATOR_JOB={job}".encode()}
        wait_until(lambda: tags <= processes.environment_of(shell.pid))
        assert pids(job) == set()
        assert not {one for one in tagged_jobs() if one.job == job}
        shell.kill()


DAEMONS = """
import ctypes, os, subprocess, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
# Twice forked, so that its parent is gone; and no word of the job in its environment.
subprocess.call(["env", "-i", "setsid", "sh", "-c", "sleep 1000 & exit 0"])
zombie = subprocess.Popen(["true"])  # never waited for
time.sleep(1000)
"""


def test_untagged_daemon_belongs_to_supervisor(job: str) -> None:
    """As the supervisor, which has no tags either: orphans of what it started fall to it."""
    supervisor = subprocess.Popen([PYTHON, "-c", DAEMONS], start_new_session=True)
    try:
        found = wait_until(
            lambda: [
                p
                for p in JobProcesses(PartDir(job, 0), supervisor.pid).living()
                if p.name == "sleep"
            ]
        )
        assert [p.parent for p in found] == [supervisor.pid]
        wait_until(lambda: pids(job, 0, supervisor.pid) == {found[0].pid})  # no zombie, not itself
        assert pids(job) == set()
        assert send_signal(found[0], signal.SIGKILL)
        wait_until(lambda: not alive(found[0].pid))
    finally:
        supervisor.kill()
        supervisor.wait()


def test_zombie_is_not_living(job: str, start: Start) -> None:
    """A zombie keeps its PID until its parent asks; it holds nothing and cannot be killed."""
    pid = start(job, 0)
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    processes.wait_for_end([process(pid)], 30.0)
    assert process(pid).state == "Z"
    assert pids(job) == set() and not processes.is_alive(process(pid))


FIRST_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.parametrize("pidfd", [True, False])
def test_process_lives_until_last_thread_ends(
    job: str, start: Start, monkeypatch: pytest.MonkeyPatch, pidfd: bool
) -> None:
    """Its first thread is a zombie in /proc; the others hold its files and ports."""
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    pid = start(job, 0, PYTHON, "-c", FIRST_THREAD_ENDS)
    shown = Path(f"/proc/{pid}/stat")
    wait_until(lambda: shown.read_text().rpartition(")")[2].split()[0] == "Z")
    ours = JobProcesses(PartDir(job, 0))
    assert [one.pid for one in ours.living()] == [pid]
    assert processes.is_leaving(process(pid)), "to tell whether it ends by itself"
    os.kill(pid, signal.SIGKILL)
    assert ours.wait(30.0)
    assert not alive(pid)


def test_dying_process_without_environment_is_living(
    job: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes the environment away before it closes files and ports."""
    pid = start(job, 0)
    ours = JobProcesses(PartDir(job, 0))
    assert [one.pid for one in ours.living()] == [pid]
    monkeypatch.setattr(processes, "environment_of", lambda _: set())
    assert [one.pid for one in ours.living()] == [pid]
    os.kill(pid, signal.SIGKILL)
    assert ours.wait(30.0)
    assert ours.living() == []


def test_supervisor_counts_before_it_has_tags(job: str, start: Start) -> None:
    """It has no tag, and is known by its command line, where its owner is the one who asks."""
    words = [PYTHON, "-c", "import time; time.sleep(1000)", "supervise", job, "0", "2"]
    pid = start("x", 0, *words)
    start("x", 0, *words[:-2], "1", "2")
    assert [one.pid for one in JobProcesses(PartDir(job, 0)).living()] == [pid]
    assert JobProcesses(PartDir(job, 0)).members() == []
    assert JobProcesses(PartDir(job, 0), owner=os.getuid() + 1).living() == []


@pytest.mark.parametrize("pidfd", [True, False])
def test_reused_pid_gets_no_signal(
    job: str, start: Start, monkeypatch: pytest.MonkeyPatch, pidfd: bool
) -> None:
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    pid = start(job, 0)
    now = process(pid)
    before = now._replace(started=now.started - 1)
    assert not send_signal(before, signal.SIGKILL)
    assert not processes.is_alive(before)
    time.sleep(0.02)
    assert alive(pid)
    assert send_signal(now, signal.SIGKILL)
    wait_until(lambda: not alive(pid))


def test_tagged_jobs_lists_jobs_by_tags(job: str, start: Start) -> None:
    start(job, 0)
    start(job, 3)
    start(f"no job's name, {job}", 0)
    start(job, 0, ORCHESTRATOR_RUN=f"/x/runs/{job}/many")
    found = {one for one in tagged_jobs() if job in one.job}
    assert found == {
        Tagged(job, part, 2, os.getuid(), f"/x/runs/{job}/{part}/2") for part in (0, 3)
    }


@pytest.mark.skipif(os.getuid() != 0, reason="needs a process of another user")
def test_tagged_jobs_names_owner(job: str, start: Start) -> None:
    start(job, 0, "setpriv", "--reuid=65534", "--clear-groups", "sleep", "1000")
    wait_until(lambda: any(p.name == "sleep" for p in processes_of_job(PartDir(job, 0))))
    assert {one.owner for one in tagged_jobs() if one.job == job} == {65534}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/a b"), "/a b: No space left on device"),
        (OSError(errno.ENOSPC, "No space left on device", "/a"), r"device \(`df -i` shows"),
        (OSError(errno.EROFS, "Read-only file system", "/h/o/runs/x"), "; ORCHESTRATOR_HOME, set"),
        (OSError(errno.EROFS, "Read-only file system", "/h/other"), "Read-only file system$"),
        (OSError(errno.EBUSY, "another fetches into it"), "another fetches into it"),
        (OSError(errno.EMFILE, "Too many open files", "/a"), r"its login .* \(`ulimit -n`\)"),
        (OSError(errno.EFBIG, "File too large"), r"its login .* \(`ulimit -f`\)"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), r"\(`ulimit -u`\)"),
        (ValueError("embedded null byte"), "embedded null byte"),
    ],
)
def test_in_words_explains_system_error(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", "/h/o")
    assert re.search(said, error_in_words(error)) and "Errno" not in error_in_words(error)
