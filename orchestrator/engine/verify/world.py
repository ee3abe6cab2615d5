"""The ranks of a verify run, and the little that they tell each other.

It needs nothing but torch: no numpy, which torch's collectives of objects use, and no FSDP. A
machine that is to be verified may lack both.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.common.errors import CheckFailed
from orchestrator.engine.observe import speed
from orchestrator.engine.ranks.ranks import free_host_memory

# The memory assumed where the system does not say how much is free.
UNKNOWN_BYTES = 1 << 30


@dataclass(frozen=True)
class World:
    """This process among all; `nodes` and `hosts` are those of every rank, in their order."""

    rank: int
    size: int
    local: int
    backend: str
    device: torch.device
    nodes: tuple[int, ...]
    hosts: tuple[str, ...]

    @property
    def node(self) -> int:
        return self.nodes[self.rank]

    def of_node(self, node: int) -> list[int]:
        return [rank for rank, its in enumerate(self.nodes) if its == node]

    def exchange(self, what: Any) -> list[Any]:
        """Return every rank's value, in order of rank, on every rank."""
        own = bytearray(json.dumps(what).encode("ascii"))
        sizes = _gathered(torch.tensor([len(own)]), self.size)
        room = int(max(sizes))
        padded = torch.zeros(room, dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(own, dtype=torch.uint8)
        texts = zip(_gathered(padded, self.size), sizes, strict=True)
        return [json.loads(bytes(text[: int(size)].tolist())) for text, size in texts]

    def most(self, value: float) -> float:
        """Return the largest value of all ranks, once all are here."""
        largest = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)

    def settle(self) -> None:
        speed.settle(self.device)

    def seconds(self, run: Callable[[], Any], runs: int = 1) -> float:
        return speed.seconds_of(run, self.device, runs)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def _gathered(own: Tensor, size: int) -> list[Tensor]:
    values = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(values, own)
    return values


def join(backend: str | None, patience: float) -> World:
    """Join by NCCL between GPUs, by gloo between CPUs; no wait is longer than `patience`."""
    has_gpu = torch.cuda.is_available()
    backend = backend or ("nccl" if has_gpu else "gloo")
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if backend == "nccl":
        if local >= torch.cuda.device_count():
            raise CheckFailed(
                f"local rank {local} of {socket.gethostname()} has no GPU of its own",
                "start as many ranks as there are GPUs (leave out --nproc and slots=), or verify"
                " the CPUs with --backend gloo",
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=patience)
    # Messages are CPU tensors, which gloo carries beside NCCL.
    dist.init_process_group("cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo", timeout=timeout)
    alone = World(rank, dist.get_world_size(), local, backend, device, (), ())
    own = [int(os.environ.get("GROUP_RANK", "0")), socket.gethostname(), backend]
    described = alone.exchange(own)
    nodes, hosts = tuple(entry[0] for entry in described), tuple(entry[1] for entry in described)
    without = sorted({host for _, host, its in described if its != "nccl"})
    if len({its for _, _, its in described}) > 1:
        raise CheckFailed(
            f"some nodes have GPUs that torch can use, these have none: {', '.join(without)}",
            "verify the CPUs of all with --backend gloo, or leave those out of the list",
        )
    return World(rank, alone.size, local, backend, device, nodes, hosts)


def free_bytes(world: World) -> int:
    """Return the memory that a rank may count on: its GPU's, or its part of the node's rest."""
    if world.device.type == "cuda":
        return int(torch.cuda.mem_get_info(world.device)[0])
    try:
        return free_host_memory() // len(world.of_node(world.node))
    except OSError:
        return UNKNOWN_BYTES
