"""The helpers of a script: their values, and what becomes of mistakes that would be deadlocks."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from orchestrator import distributed
from orchestrator.common.errors import CheckFailed, JobFailed, UsageError
from orchestrator.engine.ranks import collective_check, spawn
from orchestrator.engine.ranks.ranks import rank_in_environment
from tests.engine.programs import collectives as collected
from tests.engine.worlds import PROGRAMS, Job, run


def done(directory: Path, nodes: list[int], function: str) -> Job:
    job = Job(str(directory / "job"), nodes, {}, call=f"{PROGRAMS}.collectives:{function}")
    (codes,) = run(job)
    results = "\n".join(job.output(rank) for rank in range(sum(nodes)))
    assert codes == [0] * sum(nodes), results
    return job


@pytest.mark.parametrize("nodes", [[1], [2], [2, 2]])
def test_values_are_those_computed_by_hand(tmp_path: Path, nodes: list[int]) -> None:
    job = done(tmp_path, nodes, "values")
    assert len(list(job.path.glob("done_*"))) == sum(nodes)


def test_without_a_process_group_it_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    one = torch.tensor([1, 2])
    assert distributed.all_reduce_tensor(one, "mean").tolist() == [1.0, 2.0]
    assert [t.tolist() for t in distributed.gather_tensors(one)] == [[1, 2]]
    assert distributed.broadcast_object("x") == "x"
    distributed.barrier()
    assert distributed.is_master_process()
    assert distributed.is_master_node()
    assert distributed.get_node_info()["num_nodes"] == 1
    device = distributed.get_node_info()["device"]
    assert torch.ones(1, device=device).device.type == device.partition(":")[0]
    with pytest.raises(UsageError, match="did you mean 'mean'"):
        distributed.all_reduce_tensor(one, "mea")
    with pytest.raises(UsageError, match="a tensor is needed, not 3"):
        distributed.all_reduce_tensor(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="src is 1, but the ranks are 0 to 0"):
        distributed.broadcast_object(1, src=1)


def test_backends() -> None:
    assert distributed.choose_backend("gloo") == "gloo"
    with pytest.raises(UsageError, match="did you mean 'nccl'"):
        distributed.choose_backend("ncl")
    if not torch.distributed.is_mpi_available():
        with pytest.raises(CheckFailed, match="was built without MPI"):
            distributed.choose_backend("mpi")
    if not torch.cuda.is_available():
        assert distributed.choose_backend() == "gloo"
        with pytest.raises(CheckFailed, match="this machine has no GPU"):
            distributed.choose_backend("nccl")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "1"}, "WORLD_SIZE and MASTER_ADDR and MASTER_PORT is not set"),
        ({"WORLD_SIZE": "2"}, "RANK and MASTER_ADDR and MASTER_PORT is not set"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
            "RANK is 2, but WORLD_SIZE is 2",
        ),
    ],
)
def test_half_an_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], words: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckFailed, match=words):
        rank_in_environment()


# -- debug mode -------------------------------------------------------------------------------


def test_mistakes_are_explained_on_every_rank(tmp_path: Path) -> None:
    job = done(tmp_path, [3], "mistakes")
    results = [(job.path / f"results_{rank}").read_text().split("\n---\n") for rank in range(3)]
    assert results[0] == results[1] == results[2]
    under, shapes, ops, dtypes = results[0]
    assert "JobFailed: the ranks are in different collectives" in under
    assert "rank 0: gather_tensors of torch.float32 at collectives.py:" in under
    assert "in under_the_if: gather_tensors(torch.ones(2))" in under
    assert "ranks 1, 2: barrier at collectives.py:" in under
    assert "is under `if is_master_process():` in line" in under
    assert "move it out of the if" in under
    assert "call all_reduce_tensor with arguments that do not match" in shapes
    assert "rank 2: all_reduce_tensor (sum) of torch.float32 (4,) at" in shapes
    assert "rank 0: all_reduce_tensor (max)" in ops
    assert "ranks 1, 2: gather_tensors of torch.float64" in dtypes


def test_a_rank_that_does_not_come_is_named_when_the_limit_is_over(tmp_path: Path) -> None:
    job = done(tmp_path, [3], "never")
    results = [(job.path / f"results_{rank}").read_text() for rank in range(3)]
    assert "after 0.4 s only some ranks have entered a collective" in results[1]
    assert "barrier at collectives.py:" in results[1]
    assert "rank 0: has not entered it; the last it entered was barrier at" in results[1]
    assert "ORCHESTRATOR_DEBUG_COLLECTIVES" in results[1]
    assert "after 0.4 s only some ranks" in results[0]  # it came too late, and does not go in alone


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    results = (done(tmp_path, [2], "leaves").path / "told").read_text()
    assert "only some ranks entered a collective, and would have waited forever" in results
    assert "rank 1: has ended its program without it" in results


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, seconds in {"1": 60, "on": 60, "0": 0, "": 0, "7.5": 7.5}.items():
        monkeypatch.setenv("ORCHESTRATOR_DEBUG_COLLECTIVES", text)
        assert collective_check.limit() == seconds
    monkeypatch.setenv("ORCHESTRATOR_DEBUG_COLLECTIVES", "maybe")
    with pytest.raises(UsageError, match="1, 0, or a number of seconds"):
        collective_check.limit()
    with pytest.raises(UsageError, match="must be above 0"):
        distributed.debug(-1)


@pytest.mark.parametrize(
    ("source", "line", "found"),
    [
        ("if rank == 0:\n    f()\n", 2, "  x.py:2 is under `if rank == 0:` in line 1"),
        ("if rank == 0:\n    pass\nelse:\n    f()\n", 4, ""),
        ("if ready:\n    f()\n", 2, ""),
        ("%magic\nf()\n", 2, ""),
    ],
)
def test_the_if_is_found(source: str, line: int, found: str) -> None:
    assert collective_check.guard(source.splitlines(keepends=True), line, "x.py") == found


# -- launch -----------------------------------------------------------------------------------


def test_launch_gives_results_by_rank() -> None:
    here = 10.0  # a function in a function travels with what it knows

    def inner(rank: int, world_size: int) -> tuple[int, float]:
        return collected.add_up(rank, world_size, here)

    assert spawn.launch(inner, (), 2) == [(0, 21.0), (1, 21.0)]


def test_what_a_rank_raises_is_raised() -> None:
    with pytest.raises(KeyError, match="the dog ate it") as raised:
        spawn.launch(collected.fails, (), 2)
    assert "on rank 1" in str(raised.value.__cause__)
    assert "collectives.py" in str(raised.value.__cause__)


def test_a_rank_that_is_killed_is_named() -> None:
    with pytest.raises(JobFailed, match="rank 0 ended with SIGKILL and gave no result"):
        spawn.launch(collected.dies, (), 1)


def test_an_exception_that_cannot_travel_is_told_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    blob = spawn.packed((sys.path, str(Path.cwd()), collected.odd, False, ()))
    good, error, trace = pickle.loads(spawn.outcome(blob))
    assert not good
    assert str(error) == "Odd: 7: lost"
    assert "in odd" in trace


def test_nothing_is_left_of_a_launcher_that_was_killed(tmp_path: Path) -> None:
    code = f"""
import os, pathlib, time
from orchestrator import Trainer
def fn(rank, world_size):
    pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()
    time.sleep(600)
Trainer.launch(fn, nprocs=1)
"""
    launcher = subprocess.Popen([sys.executable, "-c", code])
    while not (pids := [int(path.name) for path in tmp_path.iterdir()]):
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    for pid in pids:
        while Path(f"/proc/{pid}").exists() and "(zombie)" not in state(pid):
            time.sleep(0.05)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "(zombie)"


def test_launch_refuses_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"takes \(\) -> 'None'"):
        spawn.launch(collected.fails, [1], 2)
    with pytest.raises(UsageError, match=r"nprocs must be at least 1 \(got 0\)"):
        spawn.launch(collected.add_up, [1.0], 0)
    with pytest.raises(UsageError, match="cannot be sent to other processes"):
        spawn.launch(collected.add_up, [threading.Lock()], 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="call the function itself"):
        spawn.launch(collected.add_up, [1.0], 2)
