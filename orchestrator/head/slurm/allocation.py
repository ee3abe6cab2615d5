"""The nodes of the Slurm allocation that this process runs in, in place of a node list."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.common import slurm_environment
from orchestrator.common.errors import CheckFailed
from orchestrator.head.connect.subprocess_transport import SrunTransport
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.slurm import queue
from orchestrator.records import experiment, experiments
from orchestrator.records.experiment import Experiment, JobRecord


@dataclass(frozen=True)
class SlurmNodes:
    """The nodes of an allocation, the first the master; srun leads to them."""

    job: str
    nodes: tuple[Node, ...]
    addresses: Mapping[str, str] = field(default_factory=dict)  # node name -> its IP address
    batch: bool = False  # this process is the batch script: Slurm warns it of the time limit
    directory: Path | None = None  # the experiment that was submitted

    def transport(self, timeout: float) -> SrunTransport:
        return SrunTransport(self.job, self.addresses, timeout=timeout)

    def experiment(self, root: Path, name: str) -> Experiment:
        """Make a new directory; a batch job that Slurm starts again continues in its own."""
        if not self.batch:
            return experiments.create(root, name)
        mine = experiments.of_slurm_job(root, self.job)
        if self.directory is not None:
            mine = Experiment(self.directory)
        directory = mine.again() if mine else experiments.create(root, name)
        directory.write(experiment.SLURM_JOB, self.job + "\n")
        return directory

    def mark(self, record: JobRecord) -> JobRecord:
        return replace(record, slurm_job=self.job, batch=self.batch)


def allocated(*, asked: bool) -> SlurmNodes | None:
    """Return Slurm's nodes if we are inside an allocation; if not, that is an error if `asked`."""
    given = slurm_environment.given(os.environ)
    if given is None:
        if not asked:
            return None  # the reader of node lists says what is missing
        raise CheckFailed(
            "--nodes-from slurm, but this is not inside an allocation of Slurm",
            "run it inside `salloc --nodes=2`; or: orchestrator submit slurm --nnodes 2 ...",
        )
    check_called_once()
    expanded = queue.hostnames(os.environ["SLURM_JOB_NODELIST"])
    if expanded is not None and tuple(expanded) != given.nodes:
        raise CheckFailed(
            f"SLURM_JOB_NODELIST is {' '.join(given.nodes)} to us and {' '.join(expanded)} to"
            " scontrol",
            "write the nodes into a list and name it with --nodes",
        )
    tasks = given.tasks_per_node
    slots = tasks if tasks and tasks > 1 and not os.environ.get("SLURM_GPUS_ON_NODE") else None
    nodes = tuple(Node(name, slots=slots) for name in given.nodes)
    batch = in_batch()
    if batch:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the time limit: too early to save anything
    directory = os.environ.get("ORCHESTRATOR_SUBMITTED") if batch else None
    return SlurmNodes(
        given.job,
        nodes,
        queue.addresses(given.nodes),
        batch,
        Path(directory) if directory else None,
    )


def in_batch() -> bool:
    """Tell whether this process is the batch script of a Slurm job."""
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
