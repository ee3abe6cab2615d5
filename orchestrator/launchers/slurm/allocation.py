"""The nodes that Slurm gave to the job we are in, in place of a node list. Called by cli.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from orchestrator import slurm_environment
from orchestrator.errors import CheckFailed
from orchestrator.head.connect.subprocess_transport import Allocation
from orchestrator.head.inventory.node_list import Node
from orchestrator.head.slurm import queue


def chosen(launcher: str | None, nodes: Path, *, listed: bool) -> Allocation | None:
    """Slurm's nodes where they are meant: asked for, or there is no list and we are inside."""
    if launcher == "accelerate":  # it starts ranks; nodes are found as without it
        launcher = "slurm" if in_batch() and not listed else None
    if launcher == "ssh" or (launcher is None and (listed or nodes.exists())):
        return None
    given = slurm_environment.given(os.environ)
    if given is None:
        if launcher is None:
            return None  # the reader of node lists says what is missing
        raise CheckFailed(
            "--launcher slurm, but this is not inside an allocation of Slurm's",
            "salloc --nodes=2, and type it there; or: orchestrator submit slurm --nnodes 2 ...",
        )
    check_called_once()
    told = queue.hostnames(os.environ["SLURM_JOB_NODELIST"])
    if told is not None and tuple(told) != given.nodes:
        raise CheckFailed(
            f"SLURM_JOB_NODELIST is {' '.join(given.nodes)} to us and {' '.join(told)} to scontrol",
            "write the nodes into a list and name it with --nodes",
        )
    tasks = given.tasks_per_node
    slots = tasks if tasks and tasks > 1 and not os.environ.get("SLURM_GPUS_ON_NODE") else None
    found = tuple(Node(name, slots=slots) for name in given.nodes)
    batch = in_batch()
    if batch:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the time limit: too early to save anything
    directory = os.environ.get("ORCHESTRATOR_SUBMITTED") if batch else None
    return Allocation(
        given.job,
        found,
        queue.addresses(given.nodes),
        batch,
        Path(directory) if directory else None,
    )


def in_batch() -> bool:
    """Is this the batch script of a job of Slurm's?"""
    return os.environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in os.environ


def check_called_once() -> None:
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_ID" in os.environ and tasks != "1":
        rank = os.environ.get("SLURM_PROCID", "?")
        raise CheckFailed(
            f"srun started this command {tasks} times (this is task {rank}); it has to run once,"
            " and starts the nodes itself",
            "leave out srun: master_launch ... in the batch script or at salloc's prompt",
        )
