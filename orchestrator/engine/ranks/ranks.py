"""Join the process group, also as a task of srun, and know this process among all."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from orchestrator.common import slurm_environment
from orchestrator.common.errors import CheckFailed
from orchestrator.config.schema import Config

T = TypeVar("T")
MEMINFO = Path("/proc/meminfo")
LEAVING_SECONDS = 10.0  # for what a GPU has still to do


@dataclass(frozen=True)
class Ranks:
    """This process among all; `nodes` holds (node, host) of every rank, in their order."""

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


@contextlib.contextmanager
def joined(config: Config) -> Iterator[Ranks]:
    yield join(config)
    # After an error this is not reached: others may sit in a collective that will never end.
    dist.destroy_process_group()


def join(config: Config) -> Ranks:
    """Join the process group: NCCL between GPUs, gloo between CPUs and for what is small.

    One that is there already, because the user made it, is taken as it is.
    """
    device = device_of_rank()
    if not dist.is_initialized():
        start_group(config, device)
        wait_as_long(config, host_group())
    nodes = nodes_of_ranks()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return Ranks(dist.get_rank(), dist.get_world_size(), local, device, nodes)


def nodes_of_ranks() -> tuple[tuple[int, str], ...]:
    """Return (node, host) of every rank; ranks without torchrun are known by their hosts."""
    described = gather((os.environ.get("GROUP_RANK"), os.uname().nodename))
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
    rank, world = rank_in_environment()
    os.environ.setdefault("RANK", "0")  # a single process, started by hand without torchrun
    os.environ.setdefault("WORLD_SIZE", "1")
    # gloo connects two ranks when they first talk to each other, and not all with all: a rank then
    # has open files for a few neighbours, where it had one for every rank of every group.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    allow_many_files()
    alone = None if "MASTER_ADDR" in os.environ else "tcp://127.0.0.1:0"
    dist.init_process_group(both, alone, timeout, world, rank)
    atexit.register(finish)
    if backend == "nccl":
        atexit.register(leave)
    if backend == "nccl" and world > 1:
        # NCCL connects in the first collective: a network that does not work shows here, and not at
        # the first gradient. (device_id= would do it, too; but then torch splits NCCL's group for
        # every group of gloo's, which only the ranks outside of it take part in: a deadlock.)
        dist.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)


def leave() -> None:
    """Leave the group at the end of a program that did not fail: NCCL complains of any other end.

    One that failed leaves at once: others may sit in a collective that will never end.
    """
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        leaves = threading.Thread(target=dist.destroy_process_group, daemon=True)
        with contextlib.suppress(RuntimeError):  # a Python that starts no thread any more
            leaves.start()
            leaves.join(LEAVING_SECONDS)


def allow_many_files() -> None:
    """Raise the limit of open files, usually 1,024: rank 0 talks to all to plan a checkpoint."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def rank_in_environment() -> tuple[int, int]:
    """Return (rank, world) by the environment; raise for half of one, before others wait for it."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing and (rank > 0 or world > 1):
        raise CheckFailed(
            f"the environment says rank {rank} of {world}, but {' and '.join(missing)} is not set",
            "start the program with master_launch or torchrun, or export all of "
            + ", ".join(names),
        )
    if not 0 <= rank < world:
        raise CheckFailed(f"RANK is {rank}, but WORLD_SIZE is {world}: ranks are 0 to {world - 1}")
    return rank, world


def gather(what: T, among: dist.ProcessGroup | None = None) -> list[T]:
    """Return what each rank has, in order; of one group, which has to be gloo's, if it is named."""
    if not dist.is_initialized():  # one process, which has joined no others
        return [what]
    group = among or host_group()
    values: list[Any] = [what] * dist.get_world_size(group)
    dist.all_gather_object(values, what, group=group)
    return values


def from_rank_0(value: T) -> T:
    """Return what rank 0 has, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0, group=host_group())
    return held[0]


def host_group() -> dist.ProcessGroup | None:
    """Return the group for objects and flags: never a GPU's stream."""
    return _host_group(dist.group.WORLD)


@functools.cache
def _host_group(world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Make one per process group: a notebook may end one and begin another."""
    return None if dist.get_backend(world) == "gloo" else dist.new_group(backend="gloo")


def wait_as_long(config: Config, *groups: dist.ProcessGroup | None) -> None:
    """Set distributed.timeout: torch gives all but the first group 10 or 30 minutes."""
    timeout = datetime.timedelta(seconds=config.distributed.timeout)
    # Public from torch 2.14 on, which warns of the other.
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    for group in groups:
        set_timeout(timeout, group)


def device_of_rank() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count == 1 and "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ","):
        local = 0  # a wrapper shows each rank its own GPU
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
# Seconds between two looks; a thread that waits for the interpreter gets it here.
PAUSE_SECONDS = 0.001
IDLE_CHECKS = 3  # so many in a row without one that runs
LIMIT_SECONDS = 5.0


def finish() -> None:
    """Return when all of them sleep, or after the limit."""
    deadline = time.monotonic() + LIMIT_SECONDS
    asleep = 0
    while asleep < IDLE_CHECKS and time.monotonic() < deadline:
        asleep = 0 if running() else asleep + 1
        time.sleep(PAUSE_SECONDS)


def running() -> bool:
    for directory in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            name, _, rest = (directory / "stat").read_text().partition("(")[2].rpartition(")")
            if name == NAME and rest.split()[0] != "S":
                return True
    return False


# -- tasks of srun ---------------------------------------------------------------------------------


def take_place() -> None:
    """Turn a task of srun into a rank; keep whatever torchrun or the user has set."""
    if "RANK" in os.environ:
        return
    task = slurm_environment.task(os.environ)
    if task is None:
        tasks = slurm_environment.alone_by_mistake(os.environ)
        if tasks:
            say_once(f"this process runs alone; to start all {tasks} tasks, put srun before python")
        return
    variables = slurm_environment.variables(task, os.environ)
    os.environ.update(variables)
    if task.rank == 0:
        master = f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
        say_once(f"ranks from Slurm: {task.world} tasks of srun, master {master}")


def say_once(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
