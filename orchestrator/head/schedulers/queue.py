"""Runs Slurm's commands: squeue, sbatch, scancel, scontrol, and srun to reach the nodes."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.common import slurm_environment
from orchestrator.common.errors import CheckFailed, NodeError
from orchestrator.head.connect.ssh_config import Login
from orchestrator.head.connect.subprocess_transport import ProcessChannel, ProcessConnection
from orchestrator.head.connect.way import Way
from orchestrator.head.nodes.node_list import Node
from orchestrator.protocol.timing import SLURM_SECONDS
from orchestrator.records import experiment, experiments
from orchestrator.records.experiment import Experiment, JobRecord

log = logging.getLogger(__name__)

OVER = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
)
UNKNOWN = "Invalid job id"


@dataclass(frozen=True)
class QueueEntry:
    """A job in the queue: its state and the reason. Without a state it has left the queue."""

    state: str = ""
    reason: str = ""

    @property
    def over(self) -> bool:
        return not self.state or self.state in OVER

    def __str__(self) -> str:
        known = self.reason not in ("", "None")
        return f"{self.state or 'no longer known'}{f' ({self.reason})' if known else ''}"


def run_slurm(*command: str, stdin: str | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a command of Slurm and return its output; raise NodeError if it fails."""
    if shutil.which(command[0]) is None:
        raise CheckFailed(
            f"there is no {command[0]} here",
            "run this where Slurm's commands are installed: a login node",
        )
    log.debug("runs %s", command[0])
    try:
        done = subprocess.run(
            command,
            input=stdin or "",
            capture_output=True,
            text=True,
            check=False,
            timeout=SLURM_SECONDS,
            env=env,
        )
    except subprocess.TimeoutExpired:
        raise NodeError(
            f"Slurm does not answer ({command[0]}, {SLURM_SECONDS:.0f} s)", "try: scontrol ping"
        ) from None
    if done.returncode:
        complaint = re.sub(r"^\w+: (error: )?", "", done.stderr.strip(), flags=re.MULTILINE)
        raise NodeError(f"{command[0]}: {complaint or f'exit code {done.returncode}'}")
    return done.stdout


def find_job(job: str) -> QueueEntry:
    try:
        output = run_slurm(
            "squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%r"
        )
    except NodeError as error:
        if UNKNOWN in error.what:
            return QueueEntry()
        raise
    lines = output.splitlines()
    return QueueEntry(*lines[0].strip().split("|", 1)) if lines else QueueEntry()


def ask_to_stop(job: str) -> None:
    """Send SIGTERM to the batch script only, which then stops the ranks."""
    run_slurm("scancel", "--batch", "--signal=TERM", job)


def cancel_job(job: str) -> None:
    run_slurm("scancel", job)


def requeue_job(job: str) -> None:
    run_slurm("scontrol", "requeue", job)


def count_restarts(job: str) -> int:
    """Return how often Slurm has requeued a job."""
    found = re.search(r"\bRestarts=(\d+)", run_slurm("scontrol", "--oneliner", "show", "job", job))
    return int(found[1]) if found else 0


def is_out_of_time(job: str) -> bool:
    """Return True if the time limit of a job is over."""
    left = run_slurm("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%L").strip()
    return left in ("0:00", "INVALID")


def submit_file(file: str, env: Mapping[str, str]) -> str:
    """Submit a batch file with these variables added, and return the number of its job."""
    output = run_slurm("sbatch", "--parsable", file, env={**os.environ, **env}).strip()
    # With several clusters, the cluster's name follows the number.
    return output.partition(";")[0]


# -- nodes ------------------------------------------------------------------------------------


def expand_hostnames(text: str) -> list[str]:
    """Return a host list as expanded by scontrol; without scontrol, nothing."""
    if shutil.which("scontrol") is None:
        return []
    return run_slurm("scontrol", "show", "hostnames", text).split()


def addresses_of_nodes(names: Sequence[str]) -> dict[str, str]:
    """Return node -> IP address, from the address that Slurm uses or else the node's name."""
    known: dict[str, str] = {}
    if shutil.which("scontrol") is not None:
        for line in run_slurm(
            "scontrol", "--oneliner", "show", "node", ",".join(names)
        ).splitlines():
            name = re.search(r"\bNodeName=(\S+)", line)
            address = re.search(r"\bNodeAddr=(\S+)", line)
            if name and address:
                known[name[1]] = address[1]
    return {name: resolve_name(known.get(name, name)) for name in names}


def resolve_name(name: str) -> str:
    """Return the IP address of a name on this machine, or "" if it does not resolve."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


# -- allocation ---------------------------------------------------------------------------------
# The nodes of the Slurm allocation that this process runs in, in place of a node list.


@dataclass(frozen=True)
class SlurmNodes:
    """The nodes of an allocation, which srun reaches; the first is the master."""

    job: str
    nodes: tuple[Node, ...]
    # Node name -> IP address.
    addresses: Mapping[str, str] = field(default_factory=dict)
    # True if this process is the batch script, which Slurm warns of the time limit.
    batch: bool = False
    # The directory of the submitted experiment.
    directory: Path | None = None

    def transport(self, timeout: float) -> SrunTransport:
        return SrunTransport(self.job, self.addresses, timeout=timeout)

    def experiment(self, root: Path, name: str) -> Experiment:
        """Return a new experiment, or the existing one of a batch job that Slurm restarted."""
        if not self.batch:
            return experiments.create_experiment(root, name)
        mine = experiments.experiment_of_slurm_job(root, self.job)
        if self.directory is not None:
            mine = Experiment(self.directory)
        directory = mine.again() if mine else experiments.create_experiment(root, name)
        directory.write(experiment.SLURM_JOB, self.job + "\n")
        return directory

    def mark(self, record: JobRecord) -> JobRecord:
        return replace(record, slurm_job=self.job, batch=self.batch)


def allocated_nodes(*, asked: bool) -> SlurmNodes | None:
    """Return the nodes of the allocation, or None outside one.

    Raise CheckFailed outside an allocation if `asked`, or if the nodes are ambiguous.
    """
    allocation = slurm_environment.read_allocation(os.environ)
    if allocation is None:
        if not asked:
            # The node list reader reports the missing list.
            return None
        raise CheckFailed(
            "--nodes-from slurm, but this is not inside an allocation of Slurm",
            "run it inside `salloc --nodes=2`; or: orchestrator submit slurm --nnodes 2 ...",
        )
    check_called_once()
    names = expand_hostnames(os.environ["SLURM_JOB_NODELIST"]) or allocation.nodes
    tasks = allocation.tasks_per_node
    slots = tasks if tasks and tasks > 1 and not os.environ.get("SLURM_GPUS_ON_NODE") else None
    nodes = tuple(Node(name, slots=slots) for name in names)
    batch = in_batch()
    if batch:
        # A warning of the time limit before the start: there is nothing to save yet.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    directory = os.environ.get("ORCHESTRATOR_SUBMITTED") if batch else None
    return SlurmNodes(
        allocation.job,
        nodes,
        addresses_of_nodes(names),
        batch,
        Path(directory) if directory else None,
    )


def in_batch() -> bool:
    """Return True if this process is the batch script of a Slurm job."""
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


# -- srun ------------------------------------------------------------------------------------------
# Reaches the nodes of a Slurm job; every command is a step of its own.

STEP = (
    *("--overlap", "--nodes=1", "--ntasks=1", "--mpi=none"),
    # All ranks of the node run in this one task.
    *("--cpu-bind=none",),
    # Otherwise Slurm buffers the output until a line ends.
    *("--unbuffered",),
    *("--export=ALL", "--quiet", "--job-name=orchestrator"),
)
# Every srun prints this on clusters without a plugin for CPU binding.
NO_BINDING = b"cluster configuration lacks support for cpu binding\n"


class SrunTransport:
    """Reaches the nodes of a Slurm job with srun; every command is a step of its own."""

    def __init__(
        self, job: str, addresses: Mapping[str, str] | None = None, *, timeout: float = 10.0
    ) -> None:
        self.job = job
        self.addresses = addresses or {}
        self.timeout = timeout

    def host_of(self, node: Login) -> str:
        return node.host

    def connect(self, node: Login, timeout: float | None = None) -> SrunConnection:
        program = shutil.which("srun")
        if program is None:
            raise CheckFailed(
                f"there is no srun here to reach {node.host} with",
                "type this where Slurm's commands are, on a login node or in the allocation",
            )
        where = (f"--jobid={self.job}", f"--nodelist={node.host}")
        address = self.addresses.get(node.host, "")
        return SrunConnection((program, *STEP, *where), address, Way("srun", "a Slurm job"))


class SrunConnection(ProcessConnection):
    """A connection on which every command is a step of the Slurm job."""

    def environment(self) -> dict[str, str]:
        return step_environment(os.environ)

    def channel(
        self, both: socket.socket, stderr: socket.socket, process: subprocess.Popen[bytes]
    ) -> ProcessChannel:
        return SrunChannel(both, stderr, process)


class SrunChannel(ProcessChannel):
    def recv_stderr(self, nbytes: int, /) -> bytes:
        lines = super().recv_stderr(nbytes).splitlines(keepends=True)
        return b"".join(line for line in lines if not line.endswith(NO_BINDING))


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of an outer srun or sbatch, which would be options."""
    own = ("SLURM_CONF", "SLURM_CONF_SERVER")
    return {
        name: value
        for name, value in environ.items()
        if name in own or not name.startswith(("SLURM_", "SLURMD_", "SRUN_", "SBATCH_"))
    }
