"""Ranks of a real job are asked where they are."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.head.follow.monitors import hang_report
from orchestrator.node.job import hang
from orchestrator.protocol.timing import STACKS_SIGNAL
from tests.node.running import PYTHON, Job, script, wait_until

NCCL = Path(__file__).with_name("nccl_h200.json")
WAITS = """
import os, sys
def waits():
    open("never").read()
print("ready")
if os.environ["RANK"] == "0":
    waits()
os.execlp("sh", "sh", "-c", "echo a shell; read line < never")
"""


@pytest.mark.slow
def test_who_cannot_answer_is_not_harmed(new_job: Callable[..., Job], tmp_path: Path) -> None:
    """The signal that asks a Python for its stacks would kill any other program."""
    os.mkfifo(tmp_path / "never")
    job = new_job()
    job.start(job.spec(script(tmp_path, WAITS), nproc=2, workdir=tmp_path))
    wait_until(lambda: job.said("ready", "0") and job.said("a shell", "1"))
    answers = {}

    def asked() -> bool:
        answers.update(hang.collect(job.run))
        return "in waits" in answers[0].stacks

    wait_until(asked)
    assert answers[1].stacks == "" and answers[1].program.startswith("the program sh")
    pids = {rank: pid for pid, rank in hang.rank_pids(job.run).items()}
    assert "in waits" in hang.of_process(pids[0]).stacks
    assert hang.of_process(pids[1]).program.startswith("the program sh")
    assert hang.of_process(os.getppid()).state
    assert job.ended() == {}
    job.end("enough", 0.5)
    job.wait()
    assert job.ended() == {0: -15, 1: -15}


SPINS = """
import threading
def turn(depth):
    return turn(depth - 1) if depth else [n for n in range(3)]
all_there = threading.Barrier(4)
def spins():
    all_there.wait()
    while True:
        turn(20)
def waits():
    all_there.wait()
    print("ready", flush=True)
    open("never").read()
for _ in range(3):
    threading.Thread(target=spins, daemon=True).start()
waits()
"""


@pytest.mark.slow
def test_threads_that_run_are_shown_and_not_harmed(
    new_job: Callable[..., Job], tmp_path: Path
) -> None:
    """Nobody else reads the stack of a thread that runs: that can crash the process."""
    os.mkfifo(tmp_path / "never")
    job = new_job()
    job.start(job.spec(script(tmp_path, SPINS), workdir=tmp_path))
    wait_until(lambda: job.said("ready", "0"))
    for _ in range(5):
        (answer,) = hang.collect(job.run).values()
        *others, main = answer.stacks.strip().split("\n\n")
        assert len(others) == 3 and all("in spins" in each for each in others), answer.stacks
        assert main.startswith("Current thread 0x") and "in waits" in main
        assert "answer_questions" not in answer.stacks
    (pid,) = hang.rank_pids(job.run)
    stacks = hang.file_of(job.run, "stacks", 0)
    before = hang.size_of(stacks)
    os.kill(pid, STACKS_SIGNAL)
    wait_until(lambda: "in <module>" in hang.read(stacks, before))
    assert "in spins" not in hang.read(stacks, before)
    assert job.ended() == {}
    job.end("enough", 0.5)
    job.wait()


BELOW = """
import os, threading
both_there = threading.Barrier(2)
def works():
    both_there.wait()
    open("never").read()
threading.Thread(target=works).start()
both_there.wait(); print("waits below", flush=True); open("never").read()
"""


@pytest.mark.slow
def test_a_python_below_a_shell_script_is_seen_by_py_spy(
    new_job: Callable[..., Job], tmp_path: Path
) -> None:
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if os.geteuid() and scope.exists() and scope.read_text() != "0\n":
        pytest.skip("this kernel lets nobody but root look into other processes")
    os.mkfifo(tmp_path / "never")
    (tmp_path / "below.py").write_text(BELOW)
    words = ["sh", "-c", f"{shlex.quote(PYTHON)} below.py; true"]
    text = f"import os\nos.execvp('sh', {words})"
    job = new_job()
    job.start(job.spec(script(tmp_path, text), workdir=tmp_path))
    wait_until(lambda: job.said("waits below", "0"))
    (answer,) = hang.collect(job.run).values()
    works = f'File "{re.escape(str(tmp_path))}/below.py", line [56] in works'
    others = subprocess.Popen([PYTHON, "below.py"], cwd=tmp_path, stdout=subprocess.PIPE)
    with others:  # a process of nobody's job
        assert others.stdout is not None and others.stdout.readline()
        stranger = hang.of_process(others.pid)
        others.kill()
    assert re.search(works, stranger.stacks)
    assert hang.of_process(others.pid).program == "it has ended"
    stuck = hang_report.of_rank(0, 0, answer)
    assert stuck.where == f"{tmp_path}/below.py:8 <module>()"
    assert re.search(works, answer.stacks)
    job.end("enough", 0.5)
    job.wait()


SUMS = """
import os
import torch.distributed as dist
dist.init_process_group("gloo", f"file://{os.getcwd()}/store", rank=0, world_size=1)
dist.barrier()
print("ready")
open("never").read()
"""
TORCH_FIRST = (
    "import runpy, sys, torch; del sys.argv[0]; runpy.run_path(sys.argv[0], None, '__main__')"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({}, ["2000", "None"]),
        ({"TORCH_FR_BUFFER_SIZE": "7"}, ["7", "None"]),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}, ["None", "7"]),
    ],
)
def test_torch_2_8_is_asked_to_remember(
    new_job: Callable[..., Job], tmp_path: Path, theirs: dict[str, str], words: list[str]
) -> None:
    text = (
        "import os\nfor n in ('FR', 'NCCL_TRACE'): print(os.environ.get(f'TORCH_{n}_BUFFER_SIZE'))"
    )
    job = new_job()
    job.start(job.spec(script(tmp_path, text), env=theirs)).wait(60)
    assert job.output["0"].split() == words


@pytest.mark.slow
def test_the_recorder_of_nccl_is_asked_too(new_job: Callable[..., Job], tmp_path: Path) -> None:
    """torch's own dump, of an H200 where a kernel never ends and two sums wait for it."""
    text = f"""{SUMS.partition("print")[0]}
import torch
torch._C._distributed_c10d._dump_nccl_trace_json = open({str(NCCL)!r}, 'rb').read
print("ready")
open("never").read()
"""
    os.mkfifo(tmp_path / "never")
    job = new_job()
    job.start(job.spec(script(tmp_path, text), workdir=tmp_path))
    wait_until(lambda: job.said("ready", "0"))
    stuck = hang_report.of_rank(0, 0, hang.collect(job.run)[0])
    assert stuck.waits == {("0", "nccl"): (4, "all_reduce", pytest.approx(1795823611.4, abs=1))}
    assert stuck.entered[("0", "nccl")] == 5 and ("0", "gloo") in stuck.entered
    job.end("enough", 0.5)
    job.wait()


def test_of_many_collectives_the_last_are_told_and_the_first_that_waits() -> None:
    """A program may have given a GPU a thousand collectives since the one that it is stuck in."""
    entries = [
        {
            "collective_seq_id": number,
            "process_group": ["0", "default_pg"],
            "profiling_name": "nccl:all_reduce",
            "state": "completed" if number <= 40 else "scheduled",
        }
        for number in range(1, 1001)
    ]
    found = json.loads(hang.shortened(json.dumps({"entries": entries})))["entries"]
    numbers = [entry["collective_seq_id"] for entry in found]
    assert numbers == [41, *range(951, 1001)]
    assert hang.shortened("") == hang.shortened('{"entries": 5}\n[]\n{') == ""


def test_a_step_that_is_told_breaks_the_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a job that prints little would be asked for its collectives, which may look old."""
    now = [0.0]
    monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: now[0]))
    step = tmp_path / "step_0"
    step.touch()
    run: Any = SimpleNamespace(path=str(tmp_path), log=str(tmp_path / "log"))
    activity = hang.Activity(run)
    assert activity.check() == (0, 0)
    now[0] = 700.0
    os.utime(step, (1, 1))
    assert activity.check() == (0, 0)
    now[0] = 1400.0
    assert activity.check() == (700, 700)


@pytest.mark.slow
def test_an_earlier_answer_is_not_the_answer(new_job: Callable[..., Job], tmp_path: Path) -> None:
    """Else whoever is slow would be taken for one that entered nothing since."""
    os.mkfifo(tmp_path / "never")
    job = new_job()
    spec = job.spec(script(tmp_path, SUMS), workdir=tmp_path, start="fork")
    python, *words = spec["agent"]
    job.start({**spec, "agent": [python, "-c", TORCH_FIRST, *words]})
    wait_until(lambda: job.said("ready", "0"))
    assert '"collective_seq_id"' in hang.collect(job.run)[0].collectives
    (pid,) = hang.rank_pids(job.run)
    os.kill(pid, signal.SIGSTOP)
    assert hang.collect(job.run)[0].collectives == ""
    os.kill(pid, signal.SIGCONT)
    job.end("enough", 0.5)
    job.wait()
