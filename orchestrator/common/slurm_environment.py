"""Read Slurm's environment without asking Slurm: the nodes of an allocation, the rank of a task.

Pure. Used by the head and by every rank, so it is shipped to the nodes.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.common import hosts as host_ranges
from orchestrator.common.errors import CheckFailed

MOST_HOSTS = 65536
# These ports are below the ephemeral ports of the kernel.
FIRST_PORT, PORTS = 20000, 10000


def expand_hosts(name: str, text: str) -> list[str]:
    """`n[1-2,07-09],gpu3` -> n1 n2 n07 n08 n09 gpu3, in Slurm's order; `name` is the variable's."""
    # At the commas outside of brackets.
    parts = re.split(r",(?![^[]*\])", text.strip())
    if not all(parts):
        raise half(f"{name} cannot be read: {text!r} is not a list of hosts")
    try:
        return [host for part in parts for host in host_ranges.expand_pattern(part, MOST_HOSTS)]
    except host_ranges.BadRange as error:
        raise half(f"{name} cannot be read: {error.what}, in {text!r}") from error


# -- an allocation ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Allocation:
    """The allocation that salloc or sbatch made for the job that this process is in."""

    job: str
    nodes: tuple[str, ...]
    # The value of --ntasks-per-node.
    tasks_per_node: int | None


def read_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of this process, or None; CheckFailed for half an environment."""
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not job and not listed:
        return None
    missing = "SLURM_JOB_NODELIST" if job else "SLURM_JOB_ID"
    if not job or not listed:
        raise half(f"{'SLURM_JOB_ID' if job else 'SLURM_JOB_NODELIST'} is set and {missing} is not")
    if not re.fullmatch(r"[0-9]+", job):
        raise half(f"SLURM_JOB_ID is {job!r}, which is not the number of a job")
    nodes = expand_hosts("SLURM_JOB_NODELIST", listed)
    count = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES")
    if count and count != str(len(nodes)):
        raise half(f"SLURM_JOB_NODELIST has {len(nodes)} nodes and SLURM_JOB_NUM_NODES is {count}")
    tasks = environ.get("SLURM_NTASKS_PER_NODE", "")
    return Allocation(job, tuple(nodes), int(tasks) if tasks.isdigit() else None)


def half(what: str) -> CheckFailed:
    return CheckFailed(
        f"half a Slurm environment: {what}",
        "start it inside salloc or sbatch, with all of their SLURM_ variables; or, to use SSH,"
        " unset them",
    )


# -- a task -----------------------------------------------------------------------------------

TASK = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS")


@dataclass(frozen=True)
class Task:
    """One of the processes that one srun started."""

    rank: int
    world: int
    local: int
    node: int
    # The first node of the step.
    master: str
    port: int


def read_task(environ: Mapping[str, str]) -> Task | None:
    """Return the task that this process is, or None where srun did not start it as a rank."""
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST")
    missing = [name for name in TASK if name not in environ]
    missing += [] if listed else ["SLURM_STEP_NODELIST"]
    if missing:
        raise half(f"srun started this process, but {' and '.join(missing)} is not set")
    bad = [f"{name}={environ[name]}" for name in TASK if not environ[name].isdigit()]
    if bad:
        raise half(f"{' and '.join(bad)} is not a number")
    rank, local, node, world = (int(environ[name]) for name in TASK)
    if rank >= world:
        raise half(f"SLURM_PROCID is {rank} and SLURM_STEP_NUM_TASKS only {world}")
    master = expand_hosts("SLURM_STEP_NODELIST", str(listed))[0]
    step = f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"
    return Task(rank, world, local, node, master, FIRST_PORT + zlib.crc32(step.encode()) % PORTS)


def alone_by_mistake(environ: Mapping[str, str]) -> int:
    """Return the task count if this is a lone process that srun should have started, else 0."""
    in_batch = "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ
    tasks = environ.get("SLURM_NTASKS", "")
    return int(tasks) if in_batch and tasks.isdigit() and int(tasks) > 1 else 0


def torch_variables(task: Task, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch reads; MASTER_ADDR is still a name of Slurm's."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    # With --gpus-per-task=1 every task sees one GPU, and for each of them it is number 0.
    alone = bool(visible) and "," not in visible
    return {
        "RANK": str(task.rank),
        "WORLD_SIZE": str(task.world),
        "LOCAL_RANK": "0" if alone else str(task.local),
        "GROUP_RANK": str(task.node),
        "MASTER_ADDR": environ.get("MASTER_ADDR", task.master),
        "MASTER_PORT": environ.get("MASTER_PORT", str(task.port)),
    }
