"""The environment of a rank beside torchrun's: what Slurm, mpirun or nobody would have set.

Imports nothing of ours: rank.py loads it by its path, into the process of the user's program.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.protocol.reports import RankSpec

SLURM, MPI, OWN = "slurm", "mpi", "own"  # OWN: the program starts its ranks by itself
OF_TORCHRUN = re.compile(
    r"TORCHELASTIC_.*|(LOCAL|GROUP|ROLE)_.*|TORCH_NCCL_ASYNC_ERROR_HANDLING|NPROC_PER_NODE"
)
# Of Slurm's, what a user or an allocation has set stays: it is no place among the ranks.
OF_A_JOB = tuple(
    f"SLURM_{name}" for name in ("JOB_ID", "JOBID", "JOB_NAME", "CPUS_PER_TASK", "GPUS_ON_NODE")
)

# How many collectives torch's flight recorders hold; the second is the name before torch 2.8.
RECORDED = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def complete(environ: MutableMapping[str, str], spec: RankSpec) -> None:
    """Give a rank the environment that its launch asked for."""
    wanted = spec.get("rank_env", ())
    if SLURM in wanted:
        of_job = {name: environ[name] for name in OF_A_JOB if name in environ}
        environ.update({**dict(of_slurm(environ, spec)), **of_job})
    if MPI in wanted:
        environ.update(of_mpi(environ))
    if OWN in wanted:
        leave_alone(environ)


def remember_collectives(environ: MutableMapping[str, str]) -> None:
    """Let torch 2.8 and 2.9 remember the last collectives as later ones do, if nobody chose."""
    if not any(name in environ for name in RECORDED):
        environ[RECORDED[0]] = "2000"


def cpus_in(listed: str) -> set[int]:
    """Read the numbers of CPUs as the kernel lists them: 0-3,8-11."""
    parts = (part.partition("-")[::2] for part in listed.split(","))
    return {cpu for first, last in parts for cpu in range(int(first), int(last or first) + 1)}


def leave_alone(environ: MutableMapping[str, str]) -> None:
    """Leave what says where the nodes meet."""
    for name in [name for name in environ if OF_TORCHRUN.fullmatch(name)]:
        del environ[name]


def of_slurm(environ: Mapping[str, str], spec: RankSpec) -> Iterator[tuple[str, str]]:
    """Yield what srun sets for a task."""
    attempt, hosts, node = spec.get("attempt"), spec.get("hosts", ()), int(spec["node"])
    job = str(1 + zlib.crc32((attempt["first_job"] if attempt else spec["job"]).encode()) % 10**7)
    per_node, size = environ["LOCAL_WORLD_SIZE"], environ["WORLD_SIZE"]
    cores = max(1, len(os.sched_getaffinity(0)) // int(per_node))
    yield from named("SLURM_", PROCID=environ["RANK"], LOCALID=environ["LOCAL_RANK"])
    yield from named("SLURM_", NODEID=str(node), NTASKS=size, NPROCS=size)
    yield from named("SLURM_", NNODES=str(spec["nnodes"]), JOB_NUM_NODES=str(spec["nnodes"]))
    yield from named("SLURM_", JOB_ID=job, JOBID=job, JOB_NAME=spec["experiment"])
    yield from named("SLURM_", NODELIST=",".join(hosts), JOB_NODELIST=",".join(hosts))
    yield from named("SLURM_", CPUS_PER_TASK=str(cores), GPUS_ON_NODE=per_node)
    yield from named("SLURM_", LAUNCH_NODE_IPADDR=environ["MASTER_ADDR"])
    if int(size) == int(per_node) * int(spec["nnodes"]):
        yield "SLURM_NTASKS_PER_NODE", per_node
    if node < len(hosts):
        yield "SLURMD_NODENAME", hosts[node]


def of_mpi(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what the mpirun of Open MPI sets for a rank, and what MPICH and Intel MPI set."""
    rank, size = environ["RANK"], environ["WORLD_SIZE"]
    local, per_node = environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"]
    yield from named("OMPI_COMM_WORLD_", RANK=rank, SIZE=size)
    yield from named("OMPI_COMM_WORLD_", LOCAL_RANK=local, LOCAL_SIZE=per_node, NODE_RANK=local)
    yield from named("PMI_", RANK=rank, SIZE=size)
    yield from named("MPI_", LOCALRANKID=local, LOCALNRANKS=per_node)


def named(prefix: str, **values: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        yield prefix + name, value
