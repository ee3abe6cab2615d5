"""Runs the engine's ranks as torchrun would, but from one Python that has imported torch once.

`python -m tests.engine.worlds`: every line of standard input is a job, run in its directory
(metrics and output of its ranks) and answered by their exit codes on a line. One such process
serves a whole session of tests: importing torch takes longer than most jobs.
"""

import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tests.free_ports import free_ports

ROOT = Path(__file__).parents[2]
NAME = "run_20260101_000000"
PROGRAMS = "tests.engine.programs"
# The tests' configs name this module.
CONFIGURED = f"{PROGRAMS}.configured"
# Ranks that still wait after the first failure are killed after this time.
PATIENCE = 10.0


@dataclass
class Job:
    """One run of the engine on nodes with so many ranks each."""

    directory: str
    nodes: list[int]
    config: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    # Each node has its own outputs.
    own_disks: bool = False
    # Each node has its own memory in this directory, which outlives the ranks.
    memory: str = ""
    # The last rank gets it, or all ranks if it is SIGKILL.
    signal: int | None = None
    # The signal waits until rank 0's metrics have this word so many times.
    after: tuple[str, int] = ('"loss"', 3)
    # The signal is sent this long after that moment.
    after_seconds: float = 0.0
    # A job that hangs is ended after this time.
    timeout: float = 300.0
    # This is module:function in the job's directory, called instead of the engine's run.
    call: str = ""

    @property
    def path(self) -> Path:
        return Path(self.directory)

    def experiment(self, node: int = 0) -> Path:
        return self.path / (f"node{node}" if self.own_disks else "") / NAME

    def memory_of(self, node: int) -> Path:
        return Path(self.memory, f"node{node}")

    def metrics(self, rank: int = 0, node: int = 0) -> list[dict[str, Any]]:
        path = self.experiment(node) / "outputs" / f"rank_{rank:02d}_metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        # The skipped lines are those of checkpoints.
        return [line for line in lines if "saved_bytes" not in line]

    def output(self, rank: int = 0) -> str:
        """Return what a rank said, without what gloo of torch 2.8 and 2.9 says of each group."""
        lines = (self.path / f"out_{rank}").read_text().splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("[Gloo] Rank "))


def run(*jobs: Job) -> list[list[int]]:
    forker = forking()
    assert forker.stdin is not None
    assert forker.stdout is not None
    codes = []
    for job in jobs:
        forker.stdin.write(json.dumps(asdict(job)) + "\n")
        forker.stdin.flush()
        codes.append(json.loads(forker.stdout.readline()))
    return codes


@functools.cache
def forking() -> subprocess.Popen[str]:
    """Ends with its standard input, which is closed when the tests are over."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.engine.worlds"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


# -- in the process that forks --------------------------------------------------------------------


def start(job: Job) -> list[int]:
    job.path.mkdir(parents=True, exist_ok=True)
    (job.path / "spec.json").write_text(json.dumps({"config": job.config}))
    (port,) = free_ports(1)
    pids: list[int] = []
    for node, local_world in enumerate(job.nodes):
        for local in range(local_world):
            env = {
                "ORCHESTRATOR_RUN": job.directory,
                "ORCHESTRATOR_EXPERIMENT": str(job.experiment(node)),
                "WORLD_SIZE": str(sum(job.nodes)),
                "GROUP_WORLD_SIZE": str(len(job.nodes)),
                "GROUP_RANK": str(node),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(len(pids)),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(local_world),
                **job.env,
            }
            if job.memory:
                env["ORCHESTRATOR_MEMORY_DIR"] = str(job.memory_of(node))
                job.memory_of(node).mkdir(parents=True, exist_ok=True)
            pid = os.fork()
            if pid == 0:
                rank(job, job.path / f"out_{len(pids)}", env)
            pids.append(pid)
    return pids


def disturb(job: Job, pids: list[int]) -> None:
    metrics = job.experiment() / "outputs" / "rank_00_metrics.jsonl"
    word, often = job.after
    while not metrics.exists() or metrics.read_text().count(word) < often:
        time.sleep(0.005)
        if any(ended(pid) for pid in pids):
            return
    # The test is about this very moment.
    time.sleep(job.after_seconds)
    for pid in pids if job.signal == signal.SIGKILL else pids[-1:]:
        os.kill(pid, job.signal or 0)


def ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def finish(job: Job, pids: list[int]) -> list[int]:
    """Exit codes; the first failure gives the others a while, a hang the timeout."""
    deadline = time.monotonic() + job.timeout
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes and ended(pid):
                codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if codes[pid]:
                    deadline = min(deadline, time.monotonic() + PATIENCE)
        if time.monotonic() > deadline:
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def rank(job: Job, output: Path, env: dict[str, str]) -> NoReturn:
    from orchestrator.engine import train

    os.environ.update(env)
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    code = 1
    try:
        if "SPY" in env:
            importlib.import_module("tests.engine.spy").install(Path(env["SPY"]))
        if job.call:
            module, _, name = job.call.partition(":")
            getattr(importlib.import_module(module), name)(job.path)
        else:
            train.main()
        code = 0
    except SystemExit as leaving:  # a sentence
        print(leaving.code, file=sys.stderr, flush=True)
    except Exception:  # noqa: BLE001 (told to the test)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    # Torchrun disables it before it forks a job's ranks (fast_torchrun.py).
    gc.disable()
    # All that a rank would import, some of it late: the optimizer takes dynamo, 0.4 s per rank.
    for name in ("_dynamo", "distributed.checkpoint", "distributed.fsdp", "utils.data"):
        importlib.import_module(f"torch.{name}")
    importlib.import_module("orchestrator.engine.trainer")
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        job = Job(**json.loads(line))
        pids = start(job)
        if job.signal is not None:
            disturb(job, pids)
        print(json.dumps(finish(job, pids)), flush=True)


if __name__ == "__main__":
    main()
