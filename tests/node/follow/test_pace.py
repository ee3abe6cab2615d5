"""The collectives of a program that says nothing show its steps, and who is late in each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.head.follow.monitors.slow_sources import Late, late_rank
from orchestrator.node.follow import pace
from orchestrator.node.job import hang
from orchestrator.protocol.requests.follow import Pace
from tests.node.running import Job, script, wait_until

TRAINS = """
import os, time, torch
import torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", f"file://{os.getcwd()}/store", rank=rank, world_size=2)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-4)
for step in range(10**9):
    time.sleep(0.03 + 0.03 * rank)
    model(torch.ones(8)).sum().backward()
    if step == 20:
        print("trains")
"""
TORCH_FIRST = (
    "import runpy, sys, torch; del sys.argv[0]; runpy.run_path(sys.argv[0], None, '__main__')"
)


def test_a_rank_that_is_late_in_each_step(new_job: Callable[..., Job], tmp_path: Path) -> None:
    job = new_job()
    spec = job.spec(script(tmp_path, TRAINS), workdir=tmp_path, start="fork", nproc=2)
    python, *words = spec["agent"]
    job.start({**spec, "agent": [python, "-c", TORCH_FIRST, *words]})
    wait_until(lambda: job.said("trains", "0"))

    def asked() -> dict[int, Pace]:
        assert pace.ask(job.run) == {}
        wait_until(lambda: all(Path(hang.collectives(job.run, n)).exists() for n in (0, 1)))
        return pace.read(job.run)

    def late() -> Late | None:  # once there are steps enough, and the machine has time for them
        return late_rank(asked(), {})

    found = wait_until(late)
    assert found.rank == 1 and 0.15 < found.part <= 1
    paces = asked()
    assert paces[1].at > 0 and (paces[1].awake or 0) > paces[1].denied >= 0
    assert pace.read(job.run) == {}  # an answer is read once
    job.end("enough", 0.5)
    job.wait()


def dump(kinds: Sequence[tuple[str, int]], times: Sequence[float], **more: Any) -> str:
    """What torch's flight recorder says of these collectives: their names, and sizes."""
    entries = [
        {
            "collective_seq_id": number,
            "profiling_name": name,
            "input_sizes": [[size]],
            "is_p2p": False,
            "process_group": ["0", "default_pg"],
            "time_created_ns": int(when * 1e9),
            **more,
        }
        for number, ((name, size), when) in enumerate(zip(kinds, times, strict=True), 1)
    ]
    return json.dumps({"version": "2.10", "entries": entries})


def even(count: int, seconds: float) -> list[float]:
    return [1000.0 + number * seconds for number in range(count)]


def test_what_is_a_step() -> None:
    sums = ("gloo:all_reduce", 4)
    once = [("gloo:broadcast", 1)] * 3
    steps = [sums, ("gloo:all_reduce", 8), ("gloo:all_gather", 1)] * 12
    found = pace.pace_of(dump([*once, *steps], even(39, 0.1)))
    assert found is not None and found.length == 3
    assert sorted(found.times) == list(range(4, 40))  # the last twelve steps, and no other
    assert found.times[4] == pytest.approx(1000.3)
    assert pace.pace_of(dump(steps[:27], even(27, 0.1))) is None  # nine steps are too few
    assert pace.pace_of(dump([("gloo:all_reduce", n) for n in range(99)], even(99, 0.1))) is None


def test_a_few_steps_of_many_are_told_and_all_ranks_tell_the_same() -> None:
    """What a machine is busy with for some seconds is then not all that is seen."""
    steps = [("gloo:all_reduce", 4), ("gloo:all_reduce", 8)] * 900
    one, other = (pace.pace_of(dump(steps[:n], even(n, 0.1))) for n in (1278, 1280))
    assert one is not None and other is not None
    assert 39 <= len(one.times) <= 80 and 39 <= len(other.times) <= 80  # two of each step
    assert len(one.times.keys() & other.times.keys()) >= 38
    assert min(one.times) < 100 and max(one.times) > 1200


def test_equal_parts_of_a_step_are_no_steps() -> None:
    """Buckets of one size: only the pause for the next forward pass tells the steps apart."""
    sums = [("gloo:all_reduce", 4)] * 400
    times = [1000.0 + step * 0.6 + bucket * 0.02 for step in range(20) for bucket in range(20)]
    found = pace.pace_of(dump(sums, times))
    assert found is not None and 10 < found.length <= 20
    alone = pace.pace_of(dump(sums, even(400, 0.1)))
    assert alone is not None and alone.length == 1


@pytest.mark.parametrize(
    "more",
    [
        {"profiling_name": "nccl:all_reduce"},
        {"is_p2p": True},
        {"process_group": ["1", "a part"]},
        {"time_created_ns": None},
        {"collective_seq_id": "x"},
    ],
)
def test_what_tells_nothing_of_all_ranks(more: dict[str, Any]) -> None:
    steps = [("gloo:all_reduce", 4)] * 40
    assert pace.pace_of(dump(steps, even(40, 0.1))) is not None
    assert pace.pace_of(dump(steps, even(40, 0.1), **more)) is None
    assert pace.pace_of("[" * 10**5) is None
