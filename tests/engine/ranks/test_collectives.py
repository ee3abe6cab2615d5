"""The helpers of a script: their values, and what becomes of mistakes that would be deadlocks."""

import os
import pickle
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from orchestrator import Trainer, distributed
from orchestrator.common.errors import CheckFailed, JobFailed, UsageError
from orchestrator.config.schema import Config
from orchestrator.engine.ranks import spawn
from orchestrator.engine.ranks.ranks import start_group
from tests.engine.programs import collectives as collected
from tests.engine.worlds import PROGRAMS, Job, run

pytestmark = pytest.mark.slow


def done(directory: Path, nodes: list[int], function: str) -> Job:
    job = Job(str(directory / "job"), nodes, {}, call=f"{PROGRAMS}.collectives:{function}")
    (codes,) = run(job)
    results = "\n".join(job.output(rank) for rank in range(sum(nodes)))
    assert codes == [0] * sum(nodes), results
    return job


@pytest.mark.parametrize("nodes", [[1], [2], [2, 2]])
def test_collectives_return_values_computed_by_hand(tmp_path: Path, nodes: list[int]) -> None:
    job = done(tmp_path, nodes, "values")
    assert len(list(job.path.glob("done_*"))) == sum(nodes)


def test_collectives_work_without_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_choose_backend_by_build_and_gpu() -> None:
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
        ({"RANK": "1"}, "RANK is 1, but WORLD_SIZE is 1"),
        ({"WORLD_SIZE": "2"}, "environment variable MASTER_ADDR expected, but not set"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
            "RANK is 2, but WORLD_SIZE is 2",
        ),
    ],
)
def test_partial_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], words: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((CheckFailed, ValueError), match=words):
        start_group(Config(), torch.device("cpu"))


# -- launch -----------------------------------------------------------------------------------


def test_launch_returns_results_by_rank() -> None:
    # A nested function travels with its closure.
    here = 10.0

    def inner(rank: int, world_size: int) -> tuple[int, float]:
        return collected.add_up(rank, world_size, here)

    assert spawn.launch(inner, (), 2) == [(0, 21.0), (1, 21.0)]


def test_launch_raises_exception_of_rank() -> None:
    with pytest.raises(KeyError, match="the dog ate it") as raised:
        spawn.launch(collected.fails, (), 2)
    assert "Process 1 terminated" in str(raised.value.__cause__)
    assert "collectives.py" in str(raised.value.__cause__)


def test_launch_names_killed_rank() -> None:
    with pytest.raises(JobFailed, match="rank 0 ended with SIGKILL and returned no result"):
        spawn.launch(collected.dies, (), 1)


def test_unpicklable_exception_is_sent_as_text() -> None:
    sent = spawn.as_sent(collected.Odd(7, more="lost"))
    assert str(pickle.loads(sent)) == "Odd: 7: lost"


def waits(rank: int, world_size: int, directory: Path) -> None:
    (directory / str(os.getpid())).touch()
    time.sleep(600)


def test_killed_launcher_leaves_no_process(tmp_path: Path) -> None:
    launcher = os.fork()
    if launcher == 0:
        try:
            Trainer.launch(waits, (tmp_path,), 1)
        finally:
            os._exit(1)
    while not (pids := [int(path.name) for path in tmp_path.iterdir()]):
        assert os.waitpid(launcher, os.WNOHANG) == (0, 0)
        time.sleep(0.05)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    for pid in pids:
        while Path(f"/proc/{pid}").exists() and "(zombie)" not in state(pid):
            time.sleep(0.05)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "(zombie)"


def test_launch_refuses_invalid_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"takes \(\) -> None"):
        spawn.launch(collected.fails, [1], 2)
    with pytest.raises(UsageError, match=r"nprocs must be at least 1 \(got 0\)"):
        spawn.launch(collected.add_up, [1.0], 0)
    with pytest.raises(UsageError, match="cannot be sent to other processes"):
        spawn.launch(collected.add_up, [threading.Lock()], 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="call the function itself"):
        spawn.launch(collected.add_up, [1.0], 2)
