"""Reaches the nodes of a Slurm job with srun."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping

from orchestrator.common.errors import CheckFailed
from orchestrator.head.connect.ssh_config import Login
from orchestrator.head.connect.subprocess_transport import ProcessChannel, ProcessConnection
from orchestrator.head.connect.way import Way

STEP = (
    *("--overlap", "--nodes=1", "--ntasks=1", "--mpi=none"),
    *("--cpu-bind=none",),  # all ranks of the node live in this one task
    *("--unbuffered",),  # else Slurm holds bytes back until a line ends
    *("--export=ALL", "--quiet", "--job-name=orchestrator"),
)
# Every srun prints this where no plugin could bind anything.
NO_BINDING = b"cluster configuration lacks support for cpu binding\n"


class SrunTransport:
    """Reach the nodes of a Slurm job with srun; every connection is a step of its own."""

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
    """A node where every command is a step of the Slurm job."""

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
    """Drop the variables of the srun or sbatch around us: srun would take them for options."""
    own = ("SLURM_CONF", "SLURM_CONF_SERVER")
    return {
        name: value
        for name, value in environ.items()
        if name in own or not name.startswith(("SLURM_", "SLURMD_", "SRUN_", "SBATCH_"))
    }
