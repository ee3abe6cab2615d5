"""The environment of a rank beside torchrun's: what Slurm would set, or less than torchrun sets.

Imports nothing of ours: rank.py loads it by its path, into the process of the user's program.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, MutableMapping
from typing import Any

SLURM, OWN = "slurm", "own"  # OWN: the program starts its ranks by itself
OF_TORCHRUN = re.compile(
    r"TORCHELASTIC_.*|(LOCAL|GROUP|ROLE)_.*|TORCH_NCCL_ASYNC_ERROR_HANDLING|NPROC_PER_NODE"
)
# Of Slurm's, what a user or an allocation has set stays: it is no place among the ranks.
OF_A_JOB = tuple(
    f"SLURM_{name}" for name in ("JOB_ID", "JOBID", "JOB_NAME", "CPUS_PER_TASK", "GPUS_ON_NODE")
)


def complete(environ: MutableMapping[str, str], spec: Mapping[str, Any]) -> None:
    """Give a rank the environment that its launch asked for."""
    wanted, attempt = spec.get("rank_env", ()), spec.get("attempt")
    if attempt:  # as torchrun would with restarts of its own
        environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt["number"] - 1)
        environ["TORCHELASTIC_MAX_RESTARTS"] = str(attempt["restarts"])
    if SLURM in wanted:
        of_job = {name: environ[name] for name in OF_A_JOB if name in environ}
        environ.update({**of_slurm(environ, spec), **of_job})
    if OWN in wanted:  # what says where the nodes meet stays
        for name in [name for name in environ if OF_TORCHRUN.fullmatch(name)]:
            del environ[name]


def of_slurm(environ: Mapping[str, str], spec: Mapping[str, Any]) -> dict[str, str]:
    """Return what srun sets for a task."""
    attempt, hosts, node = spec.get("attempt"), spec.get("hosts", ()), int(spec["node"])
    job = str(1 + zlib.crc32((attempt["first_job"] if attempt else spec["job"]).encode()) % 10**7)
    per_node, size, nodes = environ["LOCAL_WORLD_SIZE"], environ["WORLD_SIZE"], str(spec["nnodes"])
    cores = max(1, len(os.sched_getaffinity(0)) // int(per_node))
    rank = {"PROCID": environ["RANK"], "LOCALID": environ["LOCAL_RANK"], "NODEID": str(node)}
    sizes = {"NTASKS": size, "NPROCS": size, "NNODES": nodes, "JOB_NUM_NODES": nodes}
    names = {"JOB_ID": job, "JOBID": job, "JOB_NAME": spec["experiment"]}
    places = {"NODELIST": ",".join(hosts), "JOB_NODELIST": ",".join(hosts)}
    shares = {"CPUS_PER_TASK": str(cores), "GPUS_ON_NODE": per_node}
    if int(size) == int(per_node) * spec["nnodes"]:
        shares["NTASKS_PER_NODE"] = per_node
    found = {**rank, **sizes, **names, **places, **shares}
    return {f"SLURM_{name}": value for name, value in found.items()}
