"""Rank functions of the tests of the collectives; worlds.py passes the job's directory."""

import os
from pathlib import Path

import torch

from orchestrator.distributed import (
    all_reduce_tensor,
    barrier,
    broadcast_object,
    gather_tensors,
    get_node_info,
    is_master_node,
    is_master_process,
    setup_distributed,
)


def values(directory: Path) -> None:
    """Results equal values computed by hand; no process group exists before."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert is_master_process() == (rank == 0)
    assert is_master_node() == (os.environ["GROUP_RANK"] == "0")
    assert get_node_info()["backend"] is None
    everybody = [r + 1 for r in range(world)]
    own = torch.tensor([rank + 1.0, -(rank + 1.0)])
    product = torch.tensor(everybody).prod().item()
    expected = {
        "sum": [sum(everybody), -sum(everybody)],
        "mean": [sum(everybody) / world, -sum(everybody) / world],
        "max": [world, -1],
        "min": [1, -world],
        "product": [product, product * (-1) ** world],
    }
    for op, wanted in expected.items():
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            found = all_reduce_tensor(own.to(dtype), op)
            kept = torch.float32 if op == "mean" and dtype == torch.int64 else dtype
            assert found.dtype == kept
            assert found.tolist() == wanted, (op, dtype, found)
    assert own.tolist() == [rank + 1, -rank - 1]
    truth = torch.tensor([rank == 0, True, False])
    assert all_reduce_tensor(truth).tolist() == [1, world, 0]
    assert all_reduce_tensor(truth, "min").tolist() == [world == 1, True, False]
    assert all_reduce_tensor(truth, "max").tolist() == [True, True, False]
    assert all_reduce_tensor(torch.ones(3, 2).t()[1:], "sum").tolist() == [[world] * 3]

    # Rank 0 has no rows.
    results = gather_tensors(torch.full((rank, 2), rank))
    assert [one.tolist() for one in results] == [[[r, r]] * r for r in range(world)]
    assert [one.item() for one in gather_tensors(torch.tensor(rank))] == list(range(world))
    assert broadcast_object({"from": rank}, src=world - 1) == {"from": world - 1}
    barrier()
    info = get_node_info()
    assert (info["rank"], info["world_size"], info["local_rank"]) == (
        rank, world, int(os.environ["LOCAL_RANK"]))  # fmt: skip
    assert info["node_rank"] == int(os.environ["GROUP_RANK"])
    (directory / f"done_{rank}").touch()


# -- what launch() runs -----------------------------------------------------------------------


class Odd(Exception):
    """One that cannot be made from its own arguments, as some libraries have them."""

    def __init__(self, code: int, *, more: str) -> None:
        super().__init__(f"{code}: {more}")


def add_up(rank: int, world_size: int, start: float) -> tuple[int, float]:
    return rank, all_reduce_tensor(torch.tensor(start + rank)).item()


def fails() -> None:
    if setup_distributed()["rank"] == 1:
        raise KeyError("the dog ate it")
    barrier()


def dies() -> None:
    os.kill(os.getpid(), 9)
