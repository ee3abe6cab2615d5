"""What a job started is ended with it, also what has an environment and a session of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.node.follow import stop_job
from orchestrator.node.job import job_processes, processes, register
from orchestrator.node.server.visit import Visit
from orchestrator.protocol.requests.follow import Living, Stop, StopReceipt
from tests.node.running import Job, alive, no_group, script, wait_until

NewJob = Callable[..., Job]
# A process that says nothing of the job, leaves the session, and outlives the one that started it.
APART = """
import os, subprocess, time
print("ready", flush=True)
while not os.path.exists({go!r}):
    time.sleep(0.01)
words = "setsid /bin/sleep 1000 >/dev/null 2>&1 & echo child $!."
subprocess.run(["/bin/sh", "-c", words], env={{}})
time.sleep(1000)
"""


@pytest.fixture
def go(tmp_path: Path) -> Path:
    return tmp_path / "go"


@pytest.fixture
def job(new_job: NewJob, tmp_path: Path, go: Path) -> Iterator[Job]:
    """A job on a machine where no control group can be made for it."""
    job = new_job()
    with no_group(job):
        yield from running(job, tmp_path, go)


@pytest.fixture
def contained(new_job: NewJob, tmp_path: Path, go: Path) -> Iterator[Job]:
    """A job in a control group of its own."""
    if not os.access(register.own_group(), os.W_OK | os.X_OK):
        pytest.skip("this login may make no control group here")
    yield from running(new_job(), tmp_path, go)


def running(job: Job, tmp_path: Path, go: Path) -> Iterator[Job]:
    job.start(job.spec(script(tmp_path, APART.format(go=str(go)))))
    wait_until(lambda: job.said("ready"))
    yield job
    if "child " in job.output.get("0", ""):
        child = child_of(job)
        if alive(child):
            os.kill(child, signal.SIGKILL)


def child_of(job: Job) -> int:
    wait_until(lambda: "." in job.output["0"])
    return int(job.output["0"].partition("child ")[2].partition(".")[0])


def registered(job: Job) -> set[int]:
    known = register.read(job.run)
    return {process.pid for process in known.living()} if known else set()


def signalled(job: Job, number: signal.Signals) -> None:
    assert job.supervisor is not None
    job.supervisor.send_signal(number)
    if number == signal.SIGKILL:
        job.supervisor.wait()


def kill_all_but(job: Job, child: int) -> None:
    """Kill at once what knows of the child: its supervisor, and the ranks."""
    others = set(job.living()) - {child}
    signalled(job, signal.SIGKILL)
    for pid in others:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(alive, others)))


def stopped(job: Job) -> StopReceipt:
    order = Stop(job=job.run.job, node=0, why="enough", grace=0.0, wait=0.5)
    return stop_job.stop(job.run, order)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_apart_is_ended_where_the_supervisor_cannot(
    job: Job, go: Path, number: signal.Signals
) -> None:
    go.touch()
    child = child_of(job)
    wait_until(lambda: child in registered(job))
    if number == signal.SIGKILL:
        kill_all_but(job, child)
    else:
        signalled(job, number)
    receipt = stopped(job)
    assert not alive(child) and child in receipt.killed
    assert (receipt.left, receipt.doubtful) == ((), {})
    assert not Path(job.run.register).exists() and not job.living()


@pytest.mark.slow
def test_what_a_frozen_supervisor_never_saw_is_ended_with_it(job: Job, go: Path) -> None:
    wait_until(lambda: registered(job))
    signalled(job, signal.SIGSTOP)
    child = started_unseen(job, go)
    receipt = stopped(job)
    assert not alive(child) and child in receipt.killed
    assert (receipt.left, receipt.doubtful) == ((), {})


def started_unseen(job: Job, go: Path) -> int:
    """Return the process, which has no parent by now but the frozen supervisor."""
    assert job.supervisor is not None
    before = children_of(job.supervisor.pid)
    go.touch()
    wait_until(lambda: children_of(job.supervisor.pid) - before)  # type: ignore[union-attr]
    (child,) = children_of(job.supervisor.pid) - before
    wait_until(lambda: processes.everyone()[child].name == "sleep")  # setsid becomes that
    return child


def children_of(pid: int) -> set[int]:
    return {process.pid for process in processes.everyone().values() if process.parent == pid}


@pytest.mark.slow
@pytest.mark.parametrize("jump", [0, -3600, 3600], ids=["", "set back", "set forward"])
def test_what_nobody_can_know_is_no_proof(
    job: Job, go: Path, jump: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was born when its supervisor could look no more, and has no parent by now.

    Whoever sets the clock then, makes it no older and no younger.
    """
    wait_until(lambda: registered(job))
    signalled(job, signal.SIGSTOP)
    child = started_unseen(job, go)
    kill_all_but(job, child)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + jump)
    question = Living(runs=((job.run.job, 0),))

    def doubtful(receipt: Any) -> dict[int, str]:
        """Other tests of this login leave processes that nobody can know either."""
        return {pid: name for pid, name in receipt.doubtful.items() if pid == child}

    assert doubtful(Visit().answer(question)) == {child: "sleep"}, "a restart hears of it"
    assert doubtful(stopped(job)) == {child: "sleep"}
    assert doubtful(Visit().answer(question)) == {child: "sleep"}
    assert doubtful(stopped(job)) == {child: "sleep"}, "a second look knows no more"
    assert re.search(rf"they live: .*\b{child} \(sleep\)", job.events[-1]["why"])
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not alive(child))
    wait_until(lambda: stopped(job).doubtful == Visit().answer(question).doubtful == {})
    assert not Path(job.run.register).exists()
    words = "setsid /bin/sleep 1000 >/dev/null 2>&1 & echo $!"
    other = int(subprocess.check_output(["/bin/sh", "-c", words], env={}))
    try:
        assert other not in stopped(job).doubtful, "what is proved once is not in doubt any more"
    finally:
        os.kill(other, signal.SIGKILL)


@pytest.mark.slow
def test_in_a_control_group_nothing_is_in_doubt(contained: Job, go: Path) -> None:
    """Nobody has written it down, and it says nothing of the job; the kernel knows."""
    wait_until(lambda: registered(contained))
    signalled(contained, signal.SIGSTOP)
    child = started_unseen(contained, go)
    kill_all_but(contained, child)
    (group,) = [path for path in groups_of(child) if contained.run.job in path]
    known = register.read(contained.run)
    assert known is not None and known.own_group.endswith(group)
    assert job_processes.living([(contained.run.job, 0)])
    receipt = stopped(contained)
    assert child in receipt.killed and not alive(child)
    assert (receipt.left, receipt.doubtful) == ((), {})
    assert not Path(known.own_group).exists()


@pytest.mark.slow
def test_a_control_group_goes_with_its_job(contained: Job) -> None:
    wait_until(lambda: registered(contained))
    known = register.read(contained.run)
    assert known is not None and Path(known.own_group, "cgroup.procs").exists()
    contained.end("enough", 0.0).close()
    contained.wait()
    assert not Path(known.own_group).exists()


def groups_of(pid: int) -> list[str]:
    return [line.partition("::")[2] for line in register.group(str(pid)).splitlines()]


@pytest.mark.parametrize(
    ("groups", "jobs"),
    [
        ("0::/", []),
        ("0::/user.slice/user-7.slice/session-3.scope\n", []),
        ("4:memory:/x\n0::/a/orchestrator-lm_2026-ab-12/b", [("lm_2026-ab", "12")]),
        ("4:memory:/orchestrator-job-0\n1:cpu:/\n0::/x", []),
        ("0::/orchestrator-a-0/orchestrator-b-1", [("a", "0"), ("b", "1")]),
        ("", []),
    ],
)
def test_whose_control_groups_a_process_is_in(groups: str, jobs: list[tuple[str, str]]) -> None:
    assert register.jobs_in(groups) == jobs


@pytest.mark.slow
@pytest.mark.parametrize(("jump", "moved"), [(-3600, -3600), (3600, 0), (-0.5, 0)])
def test_what_is_written_after_the_clock_was_set_back_is_of_the_job(
    job: Job, jump: float, moved: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are older than the job are not brought to its other nodes."""
    ours, began, clock = register.Register(job.run), Path(job.run.spec).stat().st_mtime, time.time
    monkeypatch.setattr(time, "time", lambda: clock() + jump)
    for _ in range(2):
        ours.notice_clock(register.since_boot())
        assert Path(job.run.spec).stat().st_mtime == pytest.approx(began + moved, abs=0.3)


@pytest.mark.slow
def test_a_register_of_another_boot_is_none(job: Job) -> None:
    path = wait_until(lambda: Path(job.run.register) if registered(job) else None)
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "boot": "another"}))
    assert register.read(job.run) is None and register.is_of_another_boot(job.run)
    path.write_text("{")
    assert register.read(job.run) is None


@pytest.mark.slow
def test_a_register_with_something_alive_keeps_its_run(job: Job, go: Path) -> None:
    go.touch()
    child = child_of(job)
    wait_until(lambda: child in registered(job))
    kill_all_but(job, child)
    assert job_processes.living([(job.run.job, 0)]) == [(job.run.job, 0)]
    assert stop_job.is_unfinished(job.run)
