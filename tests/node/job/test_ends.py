"""Whatever a job leaves, and however it ends: a receipt that says "nothing left" is true."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.node.follow import stop_job
from orchestrator.node.job import processes
from orchestrator.node.job.job_processes import JobProcesses
from tests.node.job.ends import Ending
from tests.node.running import wait_until

NO_PROCESS = 2**22 - 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "way", "is_ended"),
    [
        ("storm", "kill_all_known", True),  # it forks anew each millisecond
        ("storm_apart", "freeze_supervisor", True),
        ("storm_apart", "freeze_and_kill", False),
        ("pid_namespace_daemon", "kill_with_look", True),
        ("traced", "kill_supervisor_and_rank", False),
        ("overwritten", "freeze_supervisor", True),
    ],
)
def test_a_proof_is_true(home: Path, kind: str, way: str, is_ended: bool) -> None:
    home.mkdir()
    played = Ending(home, 0, kind, way, random.Random(1)).play()
    assert not played.is_false, played.in_words
    assert not (is_ended and played.alive), played.in_words


def test_what_ends_before_it_is_read_may_have_left_a_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lists = iter([["1", "8"], ["1", "9"], ["1", "9"]])
    monkeypatch.setattr(processes.os, "listdir", lambda _: next(lists))
    living = {pid: processes.Process(pid, 1, 1, "S", "sh") for pid in (1, 9)}
    monkeypatch.setattr(processes, "find", living.get)
    assert set(processes.everyone()) == {1, 9}
    assert next(lists, None), "a list in which all could be read is the last"


def test_what_ends_while_it_is_examined_may_have_left_a_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lists = iter([["8"], ["8", "9"], []])
    monkeypatch.setattr(processes.os, "listdir", lambda _: next(lists))
    living = {pid: processes.Process(pid, 1, 1, "S", "sh") for pid in (8, 9)}
    monkeypatch.setattr(processes, "find", living.get)
    monkeypatch.setattr(processes, "alive", lambda process: process.pid == 9)
    examine: Callable[[processes.Process], bool] = lambda process: process.pid == 9  # noqa: E731
    assert set(processes.everyone(examine)) == {8, 9}


def test_what_is_gone_before_it_can_be_held_is_no_proof() -> None:
    """It may have started another one, after the look that has shown it."""

    class Chain(processes.ProcessSet):
        looks, length = 0, 1

        def find(self) -> list[processes.Process]:
            self.looks += 1
            return [processes.Process(NO_PROCESS, self.looks, 1, "S", "hops")][: self.length]

    chain = Chain()
    assert [process.name for process in chain.living()] == ["hops"]
    chain.length = 0
    assert chain.living() == []


def test_the_newest_child_is_stopped_before_it_forks_once_more() -> None:
    """Others may start processes meanwhile: another child is the newest, then."""
    ours = JobProcesses("job", 0)
    here = processes.find(os.getpid())
    assert here is not None
    ours.add([here])

    def is_caught() -> bool:
        with subprocess.Popen(["sleep", "100"]) as child:
            try:
                ours.stop_newest()
                return (processes.find(child.pid) or here).state == "T"
            finally:
                child.kill()

    wait_until(is_caught)
    ours.close()


def test_a_stopped_supervisor_is_not_waited_for() -> None:
    with subprocess.Popen(["sleep", "100"]) as supervisor:
        try:
            there = processes.find(supervisor.pid)
            assert there is not None
            assert stop_job.last_word_seconds([there]) == stop_job.LAST_WORD_SECONDS
            supervisor.send_signal(signal.SIGSTOP)
            wait_until(lambda: not stop_job.last_word_seconds([there]))
        finally:
            supervisor.kill()
