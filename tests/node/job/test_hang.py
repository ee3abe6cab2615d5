"""Ranks of a real job are asked where they are."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.head.follow.monitors.hang import stuck_rank
from orchestrator.node.job import hang, processes
from tests.node.running import Job, script, wait_until

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
def test_collect_harms_no_process_that_cannot_answer(job: Job, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never")
    job.start(job.spec(script(tmp_path, WAITS), nproc=2, workdir=tmp_path))
    wait_until(lambda: job.said("ready", "0") and job.said("a shell", "1"))
    answers = {}

    def asked() -> bool:
        answers.update(hang.collect_stacks(job.run))
        return "in waits" in answers[0].stacks

    wait_until(asked)
    assert answers[1].stacks == "" and answers[1].program.startswith("the program sh")
    assert job.ended() == {}
    job.end("enough", 0.5)
    job.wait()
    assert job.ended() == {0: -15, 1: -15}


SUMS = f"""
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo", "file://" + os.getcwd() + "/store", rank=0, world_size=1)
dist.barrier()
torch._C._distributed_c10d._dump_nccl_trace_json = open({str(NCCL)!r}, 'rb').read
print("ready")
open("never").read()
"""
TORCH_FIRST = (
    "import runpy, sys, torch; del sys.argv[0]; runpy.run_path(sys.argv[0], None, '__main__')"
)


@pytest.mark.slow
def test_collect_reads_fresh_answer_of_recorder(job: Job, tmp_path: Path) -> None:
    """torch's own dump, of an H200 where a kernel never ends and two sums wait for it.

    A rank too slow to answer again would otherwise pass for one that has entered nothing since.
    """
    os.mkfifo(tmp_path / "never")
    spec = job.spec(script(tmp_path, SUMS), workdir=tmp_path, start="fork")
    python, _, *words = spec["agent"]
    job.start({**spec, "agent": [python, "-u", "-c", TORCH_FIRST, *words]})
    wait_until(lambda: job.said("ready", "0"))
    stuck = stuck_rank(0, 0, hang.collect_stacks(job.run)[0])
    assert stuck.waits == {("0", "nccl"): (4, "all_reduce", pytest.approx(1795823611.4, abs=1))}
    assert stuck.entered[("0", "nccl")] == 5 and ("0", "gloo") in stuck.entered
    (pid,) = hang.rank_pids(job.run)
    os.kill(pid, signal.SIGSTOP)
    # Each thread stops when it is scheduled next.
    wait_until(lambda: (now := processes.find_process(pid)) is not None and now.state == "T")
    stopped = hang.collect_stacks(job.run)[0]
    assert (stopped.state, stopped.collectives) == ("T", "")
    os.kill(pid, signal.SIGCONT)
    job.end("enough", 0.5)
    job.wait()


def test_shortened_keeps_last_collectives_and_first_waiting() -> None:
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
    found = json.loads(hang.shorten_dumps(json.dumps({"entries": entries})))["entries"]
    numbers = [entry["collective_seq_id"] for entry in found]
    assert numbers == [41, *range(951, 1001)]
    assert hang.shorten_dumps("") == hang.shorten_dumps('{"entries": 5}\n[]\n{') == ""


def test_reported_step_counts_as_activity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
