"""A receipt that says "nothing left" is true for any leftovers and any end of a job."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from orchestrator.node.follow import stop_job
from orchestrator.node.job import processes
from orchestrator.protocol.requests.follow import Stop
from tests.node.job import leftovers
from tests.node.running import Job, wait_until

NO_PROCESS = 2**22 - 7


def marked(mark: Path) -> list[int]:
    lines = {pid: " ".join(processes.command_line_of(pid)) for pid in processes.all_processes()}
    return [pid for pid, line in lines.items() if str(mark) in line and pid != os.getpid()]


@pytest.mark.parametrize(
    ("kind", "signum"),
    [
        ("daemon_without", None),
        ("namespace", None),
        ("overwritten", signal.SIGSTOP),
        ("stopped", signal.SIGSTOP),
        ("many", signal.SIGKILL),
        ("daemon_with_tag", signal.SIGKILL),
    ],
)
@pytest.mark.slow
def test_stop_ends_all_leftovers(
    job: Job, tmp_path: Path, kind: str, signum: signal.Signals | None
) -> None:
    """Also of a supervisor that was stopped or killed; then the tag alone shows whose they are."""
    mark = tmp_path / "mark"
    mark.touch()
    target = {"kind": "script", "name": leftovers.__file__, "args": [kind, str(mark)]}
    job.start(job.spec(target))
    wait_until(lambda: job.said("ready"))
    if signum is not None:
        job.supervisor.send_signal(signum)
    wait = 0.5 if signum == signal.SIGSTOP else 3.0
    order = Stop(job=job.run.job, part=0, attempt=1, why="test", grace=0.2, wait=wait)
    receipt = stop_job.stop_part(job.run, order)
    left = marked(mark)
    mark.unlink()
    assert receipt.known and (receipt.left, left) == ((), [])


def test_everyone_rereads_until_list_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lists = iter([["1", "8"], ["1", "9"], ["1", "9"]])
    monkeypatch.setattr(processes.os, "listdir", lambda _: next(lists))
    living = {pid: processes.Process(pid, 1, 1, "S", "sh") for pid in (1, 9)}
    monkeypatch.setattr(processes, "find_process", living.get)
    assert set(processes.all_processes()) == {1, 9}
    assert next(lists, None), "a list in which all could be read is the last"


def test_living_needs_two_empty_looks() -> None:

    class Chain(processes.ProcessSet):
        looks, length = 0, 1

        def find(self) -> list[processes.Process]:
            self.looks += 1
            return [processes.Process(NO_PROCESS, self.looks, 1, "S", "hops")][: self.length]

    chain = Chain()
    assert [process.name for process in chain.living()] == ["hops"]
    chain.length = 0
    assert chain.living() == []


def test_last_word_is_not_awaited_of_suspended_supervisor() -> None:
    with subprocess.Popen(["sleep", "100"]) as supervisor:
        try:
            there = processes.find_process(supervisor.pid)
            assert there is not None
            assert stop_job.last_word_seconds([there]) == stop_job.LAST_WORD_SECONDS
            supervisor.send_signal(signal.SIGSTOP)
            wait_until(lambda: not stop_job.last_word_seconds([there]))
        finally:
            supervisor.kill()
