"""Collectives for users' scripts, public as orchestrator.distributed.

Everything works in a plain `python script.py`, on one process and on many; under torchrun or
master_launch the process group is set up if it is missing. No function changes its argument, and
all return their result on every rank.
"""

from __future__ import annotations

import math
import os
from typing import TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.config.parse import check_one_of
from orchestrator.config.schema import Config, DistributedConfig
from orchestrator.engine.ranks import ranks

__all__ = ["NodeInfo", "all_reduce_tensor", "barrier", "broadcast_object", "choose_backend"]
__all__ += ["cleanup_distributed", "gather_tensors", "get_node_info", "is_master_node"]
__all__ += ["is_master_process", "setup_distributed"]

T = TypeVar("T")

OPS = {
    "sum": dist.ReduceOp.SUM,
    # gloo has no AVG, so the sum is divided afterwards.
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class NodeInfo(TypedDict):
    """The place of this process among all processes of the job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    hostname: str
    # None without a process group.
    backend: str | None
    # The device of this process, such as "cuda:1" or "cpu".
    device: str


# -- the process group ------------------------------------------------------------------------


def setup_distributed(backend: str | None = None, timeout: float = 600.0) -> NodeInfo:
    """Join the process group that the environment describes, or be a group of one."""
    chosen = choose_backend(backend)
    if dist.is_initialized():
        return get_node_info()
    # Without this, a task of srun has no RANK and would train alone.
    ranks.set_rank_variables()
    if chosen == "mpi":
        dist.init_process_group("mpi")
    else:
        ranks.join_group(Config(distributed=DistributedConfig(backend=chosen, timeout=timeout)))
    return get_node_info()


def cleanup_distributed() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def choose_backend(wanted: str | None = None) -> str:
    """Return nccl for GPUs, gloo for CPUs, or the requested backend if it can work here."""
    gpu = torch.cuda.is_available()
    if wanted is None:
        return "nccl" if gpu and dist.is_nccl_available() else "gloo"
    check_one_of("backend", wanted, ("nccl", "gloo", "mpi"))
    if wanted == "nccl" and not gpu:
        raise CheckFailed("the backend is nccl, but this machine has no GPU", "leave it out")
    if wanted == "mpi" and not dist.is_mpi_available():
        raise CheckFailed(
            f"the backend is mpi, but this torch ({torch.__version__}) was built without MPI, as"
            " every torch from pip is",
            "use nccl or gloo, or build torch from source where MPI is installed",
        )
    return wanted


# -- who am I ---------------------------------------------------------------------------------


def get_node_info() -> NodeInfo:
    """Describe this process by the process group, or by the environment before there is one."""
    joined = dist.is_initialized()
    rank = dist.get_rank() if joined else _number("RANK", 0)
    world = dist.get_world_size() if joined else _number("WORLD_SIZE", 1)
    local_world = _number("LOCAL_WORLD_SIZE", 1)
    node = next((_number(n, 0) for n in ("GROUP_RANK", "NODE_RANK") if n in os.environ), None)
    return NodeInfo(
        rank=rank,
        world_size=world,
        local_rank=_number("LOCAL_RANK", 0),
        local_world_size=local_world,
        node_rank=rank // local_world if node is None else node,
        num_nodes=_number("GROUP_WORLD_SIZE", -(-world // local_world)),
        hostname=os.uname().nodename,
        backend=dist.get_backend() if joined else None,
        device=_device(),
    )


def _device() -> str:
    """Name this process's device, as join() chooses it, without initialising CUDA."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"cuda:{_number('LOCAL_RANK', 0) % count}" if count else "cpu"


def is_master_process() -> bool:
    """Return whether this is rank 0. Never call a collective under it: the others would not."""
    return get_node_info()["rank"] == 0


def is_master_node() -> bool:
    """Return whether this rank is on node 0."""
    return get_node_info()["node_rank"] == 0


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise UsageError(f"{name} is {text!r} in the environment; it must be a number") from None


# -- collectives ------------------------------------------------------------------------------


def barrier() -> None:
    """Return when every rank is here."""
    if has_others():
        dist.barrier(group=ranks.host_group())


def all_reduce_tensor(tensor: Tensor, op: str = "sum") -> Tensor:
    """Return the element-wise sum, mean, max, min or product over all ranks.

    The mean of whole numbers is a floating-point tensor; sum and mean count true as 1.
    """
    check_one_of("op", op, tuple(OPS))
    local = _as_plain(tensor)
    value = local.to(torch.int64) if local.dtype == torch.bool else local.clone()
    if op == "mean" and not value.dtype.is_floating_point and not value.dtype.is_complex:
        value = value.to(torch.float64)
    world = 1
    if has_others():
        dist.all_reduce(value, OPS[op], group=_group(value))
        world = dist.get_world_size()
    if op == "mean":
        value = value / world
        return value if local.dtype.is_floating_point or local.dtype.is_complex else value.float()
    return value.bool() if local.dtype == torch.bool and op != "sum" else value


def gather_tensors(tensor: Tensor) -> list[Tensor]:
    """Return all ranks' tensors, in order of rank, on every rank; their shapes may differ."""
    local = _as_plain(tensor)
    if not has_others():
        return [local.clone()]
    described = ranks.gather_values((tuple(local.shape), str(local.dtype)))
    for rank, (_, dtype) in enumerate(described):
        if dtype != described[0][1]:
            raise UsageError(
                f"gather_tensors: rank 0 has {described[0][1]}, rank {rank} has {dtype}",
                "convert them to one dtype first",
            )
    sizes = [math.prod(shape) for shape, _ in described]
    padded = local.new_zeros(max(sizes))
    padded[: local.numel()] = local.flatten()
    gathered = [torch.empty_like(padded) for _ in sizes]
    if max(sizes):
        dist.all_gather(gathered, padded, group=_group(padded))
    parts = zip(gathered, sizes, described, strict=True)
    return [value[:size].view(shape) for value, size, (shape, _) in parts]


def broadcast_object(value: T, src: int = 0) -> T:
    """Return the object of rank `src` on every rank; it can be anything that pickle takes."""
    world = get_node_info()["world_size"]
    if not 0 <= src < world:
        raise UsageError(f"src is {src}, but the ranks are 0 to {world - 1}")
    holder = [value]
    if has_others():
        dist.broadcast_object_list(holder, src=src, group=ranks.host_group())
    return holder[0]


def has_others() -> bool:
    """Return True if there are other ranks, after joining their process group."""
    if not dist.is_initialized():
        if get_node_info()["world_size"] == 1:
            return False
        setup_distributed()
    return dist.get_world_size() > 1


def _as_plain(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise UsageError(
            f"a tensor is needed, not {tensor!r}",
            "wrap it: torch.tensor(value); broadcast_object takes anything",
        )
    local = tensor.detach()
    # Only a DTensor has full_tensor(). An isinstance check would need an import of a second.
    whole: Tensor = local.full_tensor() if hasattr(local, "full_tensor") else local
    return whole.contiguous()


def _group(tensor: Tensor) -> dist.ProcessGroup | None:
    return ranks.host_group() if tensor.device.type == "cpu" else None
