"""The guard that ends a rank before memory runs out. A control group stands for a small machine."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.node.job import processes
from orchestrator.node.job.part import memory
from orchestrator.node.job.part.memory import GB, MemoryGuard, MemorySample, Pool
from tests.node.running import Job, script, wait_until

GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 1 << 30
GROWS = """
import os, time
block = b"x" * (8 << 20)
rows = open(f"/dev/shm/{os.environ['ORCHESTRATOR_JOB']}", "wb") if PLACE == "shm" else []
if os.environ["RANK"] == "1" and (PLACE != "worker" or not os.fork()):
    while True:
        rows.write(block) if PLACE == "shm" else rows.append(bytes(block[:-1]) + b"y")
        time.sleep(PAUSE)
time.sleep(60)
"""


@pytest.fixture
def small_group() -> Iterator[Path]:
    group = GROUPS / f"orchestrator-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs root, and the first version of control groups")
    (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    yield group
    wait_until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "pause", "words"),
    [
        ("rank", 0.02, "; it grew by"),
        ("rank", 0.005, "; it grew by"),
        ("worker", 0.01, " has the most"),
        ("shm", 0.02, "files in /dev/shm grew by"),
    ],
)
def test_runaway_is_ended_before_kernel_kills(
    new_job: Callable[..., Job], small_group: Path, tmp_path: Path,
    place: str, pause: float, words: str,
) -> None:  # fmt: skip
    job = new_job()
    text = f"PLACE, PAUSE = {place!r}, {pause}\n{GROWS}"
    with contextlib.ExitStack() as left:
        left.callback(Path("/dev/shm", job.run.job).unlink, missing_ok=True)
        job.start(job.spec(script(tmp_path, text), nproc=2), group=small_group / "cgroup.procs")
        job.wait()
    (killed,) = (event for event in job.of_kind("rank_ended") if event["memory"])
    assert (killed["code"], killed["oom_kills"]) == (-9, 0)
    # Files in /dev/shm are no rank's memory.
    assert killed["rank"] == 1 or place == "shm"
    assert words in killed["memory"] and "1 GiB of its control group" in killed["memory"]


@pytest.mark.parametrize(
    ("total", "floor"), [(0.5, 0.03125), (8, 0.5), (32, 1), (100, 2), (2000, 4)]
)
def test_default_floor_leaves_small_machines_their_memory(total: float, floor: float) -> None:
    guard, pool = MemoryGuard(None), Pool("it", int(total * GB), 0)
    assert guard.floor_of(pool) == int(floor * GB)
    assert MemoryGuard(3.0).floor_of(pool) == 3 * GB
    guard.begun = {pool[:2]: 100 << 20}
    assert guard.floor_of(pool) == 25 << 20


@pytest.mark.parametrize(
    ("others", "free", "spared"), [(9, 0.9, True), (1, 0.9, False), (9, 0.4, False)]
)
def test_job_is_spared_while_other_programs_grow(others: int, free: float, spared: bool) -> None:
    guard = MemoryGuard(None)
    guard.samples = [
        MemorySample(0, {0: GB}, GB, 0),
        MemorySample(9, {0: 6 * GB}, (1 + others) * GB, 0),
    ]
    pool = Pool(memory.MACHINE, 32 * GB, int(free * GB))
    assert (guard.runaway(pool, {0: os.getpid()}, {}) is None) is spared


def test_ranks_continue_after_error_in_look() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as rank:
        with pytest.raises(OverflowError):
            MemoryGuard(GB).look({0: rank.pid, 1: 1 << 80})
        process = processes.find_process(rank.pid)
        rank.kill()
    assert process and process.state != "T"
