"""Agree among all ranks on who takes part in a verify run.

Needs nothing but torch: no numpy (which torch's collectives of objects use) and no FSDP, because
what is to be verified may well lack something.
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

UNKNOWN_BYTES = 1 << 30  # of memory where nobody says how many are free


@dataclass(frozen=True)
class Team:
    """Some ranks that call a collective together; `scope`: all, node, or across nodes."""

    scope: str
    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    me: int  # place of this rank among them


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
        """Give every rank what each has."""
        own = bytearray(json.dumps(what).encode("ascii"))
        sizes = _gathered(torch.tensor([len(own)]), self.size)
        room = int(max(sizes))
        padded = torch.zeros(room, dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(own, dtype=torch.uint8)
        texts = zip(_gathered(padded, self.size), sizes, strict=True)
        return [json.loads(bytes(text[: int(size)].tolist())) for text, size in texts]

    def most(self, value: float) -> float:
        """Return the largest of all ranks' values; nobody goes on before everybody is here."""
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
    """Join by NCCL between GPUs, by gloo between CPUs; nothing waits longer than `patience`."""
    has_gpu = torch.cuda.is_available()
    backend = backend or ("nccl" if has_gpu else "gloo")
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if backend == "nccl" and not has_gpu:
        raise CheckFailed(
            f"the backend is nccl, but {socket.gethostname()} has no GPU that torch can use",
            "verify its CPUs with --backend gloo",
        )
    device = torch.device("cpu")
    if backend == "nccl":
        if local >= torch.cuda.device_count():
            raise CheckFailed(
                f"local rank {local} has no GPU of its own: {torch.cuda.device_count()} are there",
                "start as many ranks as there are GPUs: leave out --nproc and slots=",
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=patience)
    # CPU tensors go beside NCCL: words need no GPU.
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


def teams(world: World) -> list[Team]:
    """Make a team of all ranks, and where all nodes are alike, those that hybrid_shard uses."""
    everyone = tuple(range(world.size))
    result = [Team("all", None, everyone, world.rank)]
    by_node = [world.of_node(node) for node in sorted(set(world.nodes))]
    if len(by_node) > 1 and len(by_node[0]) > 1 and len({len(ranks) for ranks in by_node}) == 1:
        result.append(_team_of("node", by_node, world.rank))
        result.append(
            _team_of("across", [list(ranks) for ranks in zip(*by_node, strict=True)], world.rank)
        )
    return result


def _team_of(scope: str, groups: list[list[int]], rank: int) -> Team:
    """Make every group, as every rank has to in the same order; return the one with this rank."""
    created = [(ranks, dist.new_group(ranks)) for ranks in groups]
    ranks, group = next(pair for pair in created if rank in pair[0])
    return Team(scope, group, tuple(ranks), ranks.index(rank))


def free_bytes(world: World) -> int:
    """Return the memory that a rank may count on: its GPU's, or its part of the node's rest."""
    if world.device.type == "cuda":
        return int(torch.cuda.mem_get_info(world.device)[0])
    try:
        return free_host_memory() // len(world.of_node(world.node))
    except OSError:
        return UNKNOWN_BYTES
