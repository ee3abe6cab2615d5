"""The proof of an end: what of a job is left in processes, GPUs and ports."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.node.job import stop_receipt
from orchestrator.node.job.processes import Process
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.job.stop_receipt import Stopped
from orchestrator.protocol.events import Ended, RankAtEnd
from orchestrator.protocol.requests.follow import PortState
from tests.node.running import bare_spec

DEAD = 2**22 - 7  # no PID of any process


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_receipt, "RELEASE_SECONDS", 0.2)
    monkeypatch.setattr(stop_receipt, "MACHINE_PIDS", Path("/proc/self/ns/pid").stat().st_ino)


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
        (f"{DEAD}, 40518", {DEAD: "40518 MiB"}),
        (f"{DEAD}, [N/A]", {DEAD: "some memory"}),  # under MIG, and on Windows' driver model
        (f"7, 12\n{DEAD}, 3\n{DEAD + 1}, 5", {DEAD: "3 MiB"}),
        ("", {}),
        ("No running processes found", {}),
    ],
)
def test_memory_that_a_dead_process_holds(
    nvidia: Callable[[str], None], said: str, found: dict[int, str]
) -> None:
    nvidia(f"cat <<'END'\n{said}\nEND")
    assert stop_receipt.gpu_memory({DEAD}) == (found, "")


def test_a_living_process_with_such_a_pid_is_anothers(nvidia: Callable[[str], None]) -> None:
    nvidia(f"echo {os.getpid()}, 512")
    assert stop_receipt.gpu_memory({os.getpid()}) == ({}, "")


def test_memory_that_is_given_back_late(nvidia: Callable[[str], None], tmp_path: Path) -> None:
    nvidia(f"cd {tmp_path}; [ -e asked ] || echo {DEAD}, 1; : >asked")
    assert stop_receipt.gpu_memory({DEAD}) == ({}, "")


def test_a_driver_that_hangs_is_not_waited_for(
    nvidia: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_receipt, "GPU_SECONDS", 0.3)
    nvidia("sleep 1000")
    began = time.monotonic()
    assert stop_receipt.gpu_memory({DEAD}) == ({}, "nvidia-smi did not answer in 0.3 s")
    assert time.monotonic() - began < 10


def test_a_driver_that_is_broken_is_told(nvidia: Callable[[str], None]) -> None:
    nvidia("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    words = "nvidia-smi failed: Failed to initialize NVML: Driver/library version mismatch"
    assert stop_receipt.gpu_memory({DEAD}) == ({}, words)


def test_in_a_container_the_pids_are_others(
    nvidia: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia(f"echo {DEAD}, 40518")
    monkeypatch.setattr(stop_receipt, "MACHINE_PIDS", 1)
    held, unknown = stop_receipt.gpu_memory({DEAD})
    assert not held
    assert "container" in unknown


def test_memory_on_amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_receipt, "AMD", str(tmp_path))
    for pid, amounts in ((DEAD, (3 << 30, 1 << 20)), (DEAD + 1, (0,)), (DEAD + 2, (5,))):
        (tmp_path / str(pid)).mkdir()
        for gpu, amount in enumerate(amounts):
            (tmp_path / str(pid) / f"vram_{5000 + gpu}").write_text(f"{amount}\n")
            (tmp_path / str(pid) / f"sdma_{5000 + gpu}").write_text("77\n")
    assert stop_receipt.gpu_memory({DEAD, DEAD + 1}) == ({DEAD: "3073 MiB"}, "")


def test_the_masters_port(home: Path) -> None:
    run = RunDir("job-x", 0)
    run.create()
    with socket.create_server(("0.0.0.0", 0)) as taken:
        number = taken.getsockname()[1]
        run.write_spec(bare_spec(port=number))
        assert stop_receipt.port_of(run) == PortState(number=number, free=False)
    assert stop_receipt.port_of(run) == PortState(number=number, free=True)
    Path(run.spec).unlink()
    run.write_spec(bare_spec())  # not the master
    assert stop_receipt.port_of(run) is None
    assert stop_receipt.port_of(RunDir("no-such-job", 0)) is None


def ended_with(pid: int, killed: dict[int, str]) -> Ended:
    ranks = {0: RankAtEnd(state="ended", pid=pid)}
    return Ended(time=0.0, agent=0, why="", ranks=ranks, killed=killed, left=())


def test_what_was_ended_and_what_was_killed(home: Path) -> None:
    gone = Process(DEAD, 1, 1, "S", "python")
    ended = ended_with(DEAD + 2, {DEAD + 1: "sleep"})
    stopped = Stopped("enough", time.monotonic(), True, [gone], {}, [])
    found = stop_receipt.receipt(RunDir("job-x", 1), stopped, ended)
    assert found.ended == {DEAD: "python"}
    assert found.killed == {DEAD + 1: "sleep"}
    assert (found.left, found.port, found.gpu_unknown) == ((), None, "")


def test_what_the_same_stop_had_ended_before_it_was_heard_of_here(home: Path) -> None:
    """The supervisors pass an end on among themselves: that is often faster than the head."""
    ended = ended_with(DEAD + 2, {}).replace(why="enough", lived={DEAD: "python"})
    for why, names in (("enough", {DEAD: "python"}), ("another stop, later", {})):
        stopped = Stopped(why, time.monotonic(), True, [], {}, [])
        assert stop_receipt.receipt(RunDir("job-x", 1), stopped, ended).ended == names


def test_memory_of_ranks_is_looked_for_again_later(
    home: Path, nvidia: Callable[[str], None]
) -> None:
    """`stop` again: nothing lives, but its ranks are known from the last word."""
    nvidia(f"echo {DEAD}, 9")
    ended = ended_with(DEAD, {})
    stopped = Stopped("enough", time.monotonic(), True, [], {}, [])
    found = stop_receipt.receipt(RunDir("job-x", 1), stopped, ended)
    assert found.gpu_memory == {DEAD: "9 MiB"}


def test_the_words_of_a_real_process_table() -> None:
    """What lives_anew() must tell apart: alive, a zombie, gone."""
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not stop_receipt.lives_anew(child.pid)
    child.wait()
    assert not stop_receipt.lives_anew(DEAD)
    assert stop_receipt.lives_anew(os.getpid())
