"""Joins the process group, also as a task of srun, and describes this rank and all others."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from orchestrator.common import slurm_environment
from orchestrator.common.errors import CheckFailed, JobFailed, OrchestratorError
from orchestrator.config.schema import Config

T = TypeVar("T")
MEMINFO = Path("/proc/meminfo")
# How long the end of a program waits for pending GPU work.
LEAVING_SECONDS = 10.0


@dataclass(frozen=True)
class Ranks:
    """This process among all ranks. `nodes` has (node, host) of each, in order of rank."""

    rank: int
    world: int
    local: int
    device: torch.device
    nodes: tuple[tuple[int, str], ...]

    def of_node(self, node: int) -> list[int]:
        return [rank for rank, (its, _) in enumerate(self.nodes) if its == node]

    @property
    def neighbours(self) -> list[int]:
        """Return the ranks of this node, this one among them."""
        return self.of_node(self.nodes[self.rank][0])


def join_group(config: Config) -> Ranks:
    """Join the process group: NCCL between GPUs, gloo between CPUs and for small objects.

    A process group that the user has initialised is used unchanged.
    """
    device = device_of_rank()
    if not dist.is_initialized():
        start_group(config, device)
        set_group_timeouts(config, host_group())
    nodes = nodes_of_ranks()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return Ranks(dist.get_rank(), dist.get_world_size(), local, device, nodes)


def nodes_of_ranks() -> tuple[tuple[int, str], ...]:
    """Return (node, host) of every rank. Without torchrun, a host name stands for a node."""
    described = gather_values((os.environ.get("GROUP_RANK"), os.uname().nodename))
    hosts = list(dict.fromkeys(host for _, host in described))
    return tuple(
        (hosts.index(host) if node is None else int(node), host) for node, host in described
    )


def start_group(config: Config, device: torch.device) -> None:
    backend = config.distributed.backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise CheckFailed("distributed.backend is nccl, but this node has no GPU")
    # CPU tensors stay usable beside NCCL: flags and names need no GPU.
    both = "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"
    timeout = datetime.timedelta(seconds=config.distributed.timeout)
    # These defaults serve a single process that was started without torchrun.
    rank = int(os.environ.setdefault("RANK", "0"))
    world = int(os.environ.setdefault("WORLD_SIZE", "1"))
    # gloo then connects two ranks at their first message. A rank has open files for a few others,
    # instead of one for every rank of every group.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    allow_many_files()
    if rank >= world:
        raise CheckFailed(f"RANK is {rank}, but WORLD_SIZE is {world}: ranks are 0 to {world - 1}")
    # Without an address, torch names the variable that is missing.
    alone = None if world > 1 or "MASTER_ADDR" in os.environ else "tcp://127.0.0.1:0"
    dist.init_process_group(both, alone, timeout, world, rank)
    atexit.register(finish_threads)
    if backend == "nccl":
        atexit.register(leave_group)
    if backend == "nccl" and world > 1:
        # NCCL connects in the first collective, so a broken network shows here, and not at the
        # first gradient. device_id= would connect as well, but torch then splits NCCL's group for
        # every gloo group. Only the ranks outside of that group take part, which is a deadlock.
        dist.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)


def leave_group() -> None:
    """Destroy the process group at the end of a program, because NCCL warns otherwise.

    After a failure this is skipped: other ranks may be in a collective that never ends.
    """
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        leaves = threading.Thread(target=dist.destroy_process_group, daemon=True)
        # Late in its shutdown, Python starts no more threads.
        with contextlib.suppress(RuntimeError):
            leaves.start()
            leaves.join(LEAVING_SECONDS)


def allow_many_files() -> None:
    """Raise the limit of open files (usually 1,024): for a checkpoint, rank 0 talks to all."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def gather_values(what: T, among: dist.ProcessGroup | None = None) -> list[T]:
    """Return each rank's value, in order of rank. `among` is a gloo group [default: all ranks]."""
    if not dist.is_initialized():
        return [what]
    group = among or host_group()
    values: list[Any] = [what] * dist.get_world_size(group)
    dist.all_gather_object(values, what, group=group)
    return values


def from_rank_0(value: T) -> T:
    """Return rank 0's value on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0, group=host_group())
    return held[0]


def as_failure(error: Exception, lead: str = "") -> OrchestratorError:
    """Return an error for a user unchanged, and any other as a JobFailed with its text."""
    return error if isinstance(error, OrchestratorError) else JobFailed(f"{lead}{error}")


def run_together(
    action: Callable[[], T],
    *,
    here: bool = True,
    among: dist.ProcessGroup | None = None,
    said: Callable[[Exception], OrchestratorError] = as_failure,
) -> T:
    """Call an action on the ranks that are `here`. An error of one is raised on all ranks.

    `said` returns the error to raise for an exception. Ranks that are not `here` get None.
    """
    found: list[Any] = [None]
    problem: OrchestratorError | None = None
    try:
        if here:
            found = [action()]
    # The other ranks have to learn of any error.
    except Exception as error:  # noqa: BLE001
        problem = said(error)
    if first := next(filter(None, gather_values(problem, among)), None):
        raise first
    result: T = found[0]
    return result


def host_group() -> dist.ProcessGroup | None:
    """Return the gloo group for objects and flags. It never uses a GPU's stream."""
    return _host_group(dist.group.WORLD)


@functools.cache
def _host_group(world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a gloo group for each process group: a notebook may end one and begin another."""
    return None if dist.get_backend(world) == "gloo" else dist.new_group(backend="gloo")


def set_group_timeouts(config: Config, *groups: dist.ProcessGroup | None) -> None:
    """Set distributed.timeout for groups. torch sets it only for the first group."""
    timeout = datetime.timedelta(seconds=config.distributed.timeout)
    # torch 2.14 makes the function public, and warns of the private one.
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    for group in groups:
        set_timeout(timeout, group)


def device_of_rank() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count == 1 and "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ","):
        # A wrapper has made one GPU visible to each rank.
        local = 0
    if local >= count:
        raise CheckFailed(
            f"local rank {local} has no GPU of its own: there are {count}",
            f"start {count} ranks on this node: slots={count} in the list, or --nproc {count}",
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def free_host_memory() -> int:
    """Return the bytes that programs on this machine may still take."""
    for line in MEMINFO.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def is_first() -> bool:
    return dist.get_rank() == 0


# -- gloo's threads, at the end of the program -----------------------------------------------------


NAME = "pt_gloo_runloop"
# The sleep between two checks. A thread that waits for the interpreter lock gets it then.
PAUSE_SECONDS = 0.001
# Consecutive checks without a running thread.
IDLE_CHECKS = 3
LIMIT_SECONDS = 5.0


def finish_threads() -> None:
    """Wait until all gloo threads sleep, at most LIMIT_SECONDS."""
    deadline = time.monotonic() + LIMIT_SECONDS
    asleep = 0
    while asleep < IDLE_CHECKS and time.monotonic() < deadline:
        asleep = 0 if running() else asleep + 1
        time.sleep(PAUSE_SECONDS)


def running() -> bool:
    for directory in Path("/proc/self/task").glob("*"):
        # The thread may have ended.
        with contextlib.suppress(OSError):
            name, _, rest = (directory / "stat").read_text().partition("(")[2].rpartition(")")
            if name == NAME and rest.split()[0] != "S":
                return True
    return False


# -- tasks of srun ---------------------------------------------------------------------------------


def set_rank_variables() -> None:
    """Set a rank's variables for a task of srun, unless torchrun or the user has set RANK."""
    if "RANK" in os.environ:
        return
    task = slurm_environment.read_task(os.environ)
    if task is None:
        tasks = slurm_environment.alone_by_mistake(os.environ)
        if tasks:
            say_once(f"this process runs alone; to start all {tasks} tasks, put srun before python")
        return
    variables = slurm_environment.torch_variables(task, os.environ)
    if task.world > 1:
        variables["MASTER_ADDR"] = address_of(variables["MASTER_ADDR"])
    os.environ.update(variables)
    if task.rank == 0:
        master = f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
        say_once(f"ranks from Slurm: {task.world} tasks of srun, master {master}")


def address_of(host: str) -> str:
    """Return the host's name, or its address in Slurm if only Slurm knows the name."""
    try:
        socket.getaddrinfo(host, None)
        return host
    except OSError:
        pass
    if shutil.which("scontrol") is not None:
        asked = ["scontrol", "--oneliner", "show", "node", host]
        answer = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
        match = re.search(r"\bNodeAddr=(\S+)", answer.stdout)
        if match is not None:
            return match[1]
    raise CheckFailed(
        f"the name of the first node, {host}, has no address here",
        "export MASTER_ADDR=ADDRESS before srun",
    )


def say_once(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
