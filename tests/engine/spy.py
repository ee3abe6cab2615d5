"""Recorder of a rank's calls to torch, which worlds.py installs if a job's SPY names a file.

For what shows on a CPU neither in losses nor in lines nor in files: how far ahead something is
fetched, how often it is gathered, how long a group waits. Rank 0 writes it down when it ends.
"""

import dataclasses
import datetime
import functools
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from orchestrator.engine.observe import speed
from orchestrator.engine.saving.checkpoint import Checkpoints
from orchestrator.engine.sharding import mesh

seen: dict[str, list[Any]] = {}


def install(path: Path) -> None:
    watch(mesh, "fully_shard")
    watch(FSDPModule, "set_modules_to_forward_prefetch")
    watch(FSDPModule, "set_modules_to_backward_prefetch")
    watch(DistributedDataParallel, "__init__", "ddp")
    watch(DataLoader, "__init__", "loader")
    watch(mesh, "checkpoint_wrapper", "recomputed")
    watch(torch, "log_softmax", "logits")
    watch(Checkpoints, "_stage", "copied")
    for new, old, name in (
        ("all_gather_single", "all_gather_into_tensor", "gathered"),
        ("reduce_scatter_single", "reduce_scatter_tensor", "scattered"),
    ):
        watch(dist, new if hasattr(dist, new) else old, name)
    # Recorded and not done: compiling takes longer than all else here.
    nn.Module.compile = noted("compiled", lambda *_, **__: None)  # type: ignore[method-assign]
    # 0.15 s per job, and no field is about it.
    speed.measured_matmul_flops = lambda *_: 1e12
    leave_a_note(path)


def watch(owner: Any, name: str, label: str = "") -> None:
    setattr(owner, name, noted(label or name, getattr(owner, name)))


def noted(label: str, call: Any) -> Any:
    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        seen.setdefault(label, []).append([plain(args), plain(kwargs)])
        return call(*args, **kwargs)

    return wrapper


def plain(value: Any) -> Any:
    """As JSON has it, and the same in every run."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, DeviceMesh):
        return list(value.shape)
    if isinstance(value, Tensor):
        return list(value.shape)
    policy = dataclasses.is_dataclass(value) and type(value).__name__.endswith("Policy")
    return str(value) if policy else type(value).__name__


def leave_a_note(path: Path) -> None:
    """Before the rank leaves, and of the groups, before they are gone."""
    own, leave, destroy = os.getpid(), os._exit, dist.destroy_process_group

    def exiting(code: int) -> None:
        # A DataLoader's workers also run this at their exit.
        if os.getpid() == own and os.environ["RANK"] == "0":
            path.write_text(json.dumps(seen))
        leave(code)

    def destroying() -> None:
        seen["deterministic"] = [torch.are_deterministic_algorithms_enabled()]
        seen["timeouts"] = [timeout_of(group) for group in dist.distributed_c10d._world.pg_map]
        destroy()

    os._exit = exiting  # type: ignore[assignment]
    dist.destroy_process_group = destroying  # type: ignore[assignment]


def timeout_of(group: dist.ProcessGroup) -> float:
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds
