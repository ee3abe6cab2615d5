"""Reaches nodes through a program's pipes: srun in a Slurm job, or a shell on this machine.

What runs at the other end is the same as over SSH.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.errors import CheckFailed, NodeError
from orchestrator.head.connect.ssh_config import Destination, Login
from orchestrator.head.connect.transport import readable
from orchestrator.head.connect.way import Way

STEP = (
    *("--overlap", "--nodes=1", "--ntasks=1", "--mpi=none"),
    *("--cpu-bind=none",),  # all ranks of the node live in this one task
    *("--unbuffered",),  # else Slurm holds bytes back until a line ends
    *("--export=ALL", "--quiet", "--job-name=orchestrator"),
)
# Every srun prints this where no plugin could bind anything.
NO_BINDING = b"cluster configuration lacks support for cpu binding\n"
HERE = Way("local", "a shell on this machine")


@dataclass(frozen=True)
class LiteralHosts:
    """Take host names literally, without an ssh_config."""

    file: Path | None = None

    def of_node(self, node: Login) -> Destination:
        host, user, port = node.host, node.user or "", node.port or 0
        return Destination(host=host, user=user, port=port, keys=())


class SrunTransport:
    """Reach the nodes of a Slurm job with srun; every connection is a step of its own."""

    config = LiteralHosts()

    def __init__(
        self, job: str, addresses: Mapping[str, str] | None = None, *, timeout: float = 10.0
    ) -> None:
        self.job = job
        self.addresses = addresses or {}
        self.timeout = timeout

    def connect(self, destination: Destination, timeout: float | None = None) -> ProcessConnection:
        program = shutil.which("srun")
        if program is None:
            raise CheckFailed(
                f"there is no srun here to reach {destination.host} with",
                "type this where Slurm's commands are, on a login node or in the allocation",
            )
        where = (f"--jobid={self.job}", f"--nodelist={destination.host}")
        address = self.addresses.get(destination.host, "")
        return ProcessConnection((program, *STEP, *where), address, Way("srun", "a Slurm job"))


class LocalTransport:
    """Reach this machine, without any network."""

    config = LiteralHosts()
    timeout = 10.0

    def connect(self, destination: Destination, timeout: float | None = None) -> ProcessConnection:
        return ProcessConnection((), "")


class ProcessConnection:
    """A node at the other end of a program: every command is a process of its own."""

    shell: tuple[str, ...] = ("/bin/sh", "-c")  # what a program of ours starts there

    def __init__(self, program: tuple[str, ...], address: str, way: Way = HERE) -> None:
        self.program = program
        self.address = address
        self.way = way
        self.open: list[ProcessChannel] = []

    def run(self, command: str, timeout: float) -> ProcessChannel:
        (ours, theirs), (complaints, stderr) = socket.socketpair(), socket.socketpair()
        with theirs, stderr:
            try:
                process = subprocess.Popen(
                    [*self.program, *self.shell, command],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=stderr.fileno(),
                    env=self.environment(),
                    # An srun holds its step, and so the job on its node: neither Ctrl-C nor our
                    # own end may reach it.
                    start_new_session=True,
                )
            except OSError as error:
                raise NodeError(f"{self.program[0]} cannot be started: {error.strerror}") from error
        self.open.append(self.channel(ours, complaints, process))
        self.open[-1].settimeout(timeout)
        return self.open[-1]

    def channel(
        self, both: socket.socket, stderr: socket.socket, process: subprocess.Popen[bytes]
    ) -> ProcessChannel:
        return ProcessChannel(both, stderr, process)

    def environment(self) -> dict[str, str] | None:
        return step_environment(os.environ) if self.program else None

    @property
    def alive(self) -> bool:
        return True

    def close(self) -> None:
        for pipes in self.open:
            pipes.close()


class ProcessChannel:
    """A running program's standard streams, with the interface of paramiko's channel."""

    def __init__(
        self, both: socket.socket, stderr: socket.socket, process: subprocess.Popen[bytes]
    ) -> None:
        self.both = both
        self.stderr = stderr
        self.process = process
        self.code: int | None = None  # with which it ended
        self.settimeout, self.sendall = both.settimeout, both.sendall

    def recv(self, nbytes: int, /) -> bytes:
        try:
            return self.both.recv(nbytes)
        except ConnectionResetError:  # it left input unread; what it had said can be read still
            return self.both.recv(nbytes)

    def recv_stderr_ready(self) -> bool:
        return readable(self.stderr)

    def recv_stderr(self, nbytes: int, /) -> bytes:
        lines = self.stderr.recv(nbytes).splitlines(keepends=True)
        return b"".join(line for line in lines if not line.endswith(NO_BINDING))

    def shutdown_write(self) -> None:
        self.both.shutdown(socket.SHUT_WR)

    def recv_exit_status(self) -> int:
        self.code = max(-1, self.process.wait())
        return self.code

    def close(self) -> None:
        """Close both ends: the program sees the end of its input, and a reader here wakes up."""
        for end in (self.both, self.stderr):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Drop the variables of the srun or sbatch around us: srun would take them for options."""
    own = ("SLURM_CONF", "SLURM_CONF_SERVER")
    return {
        name: value
        for name, value in environ.items()
        if name in own or not name.startswith(("SLURM_", "SLURMD_", "SRUN_", "SBATCH_"))
    }
