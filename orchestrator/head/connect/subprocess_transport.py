"""Reach nodes through a program's pipes: srun in a Slurm job, the user's own ssh, or a shell here.

What runs at the other end is the same as over SSH.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.errors import CheckFailed, NodeError
from orchestrator.head.connect import server_command, tasks
from orchestrator.head.connect.ssh_config import Destination, Login
from orchestrator.head.connect.transport import readable

STEP = (
    *("--overlap", "--nodes=1", "--ntasks=1", "--mpi=none"),
    *("--cpu-bind=none",),  # all ranks of the node live in this one task
    *("--unbuffered",),  # else Slurm holds bytes back until a line ends
    *("--export=ALL", "--quiet", "--job-name=orchestrator"),
)
# Every srun prints this where no plugin could bind anything.
NO_BINDING = b"cluster configuration lacks support for cpu binding\n"


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
        return ProcessConnection((program, *STEP, *where), self.addresses.get(destination.host, ""))


class LocalTransport:
    """Reach this machine, without any network."""

    config = LiteralHosts()
    timeout = 10.0

    def connect(self, destination: Destination, timeout: float | None = None) -> ProcessConnection:
        return ProcessConnection((), "")


class ProcessConnection:
    """A node at the other end of a program: every command is a process of its own."""

    shell: tuple[str, ...] = ("/bin/sh", "-c")  # what a program of ours starts there

    def __init__(self, program: tuple[str, ...], address: str) -> None:
        self.program = program
        self.address = address
        self.channel: Callable[..., ProcessChannel] = ProcessChannel
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
        ends = tasks.Socket.of(ours), tasks.Socket.of(complaints)
        self.open.append(self.channel(*ends, timeout, process))
        return self.open[-1]

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
        self,
        both: socket.socket,
        stderr: socket.socket,
        timeout: float,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.both = both
        self.stderr = stderr
        self.process = process
        self.code: int | None = None  # with which it ended
        self.settimeout, self.sendall = both.settimeout, both.sendall
        self.settimeout(timeout)

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
        self.code = max(-1, self.process.wait()) if self.process else -1
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


# -- the user's own ssh -----------------------------------------------------------------------
# It asks nobody anything: for a session it goes by a connection that the user has open
# (ControlMaster), or by what only ssh itself can do.

OPTIONS = (
    *("BatchMode=yes", "LogLevel=ERROR", "ServerAliveInterval=15"),
    # What a config has for terminals; and no session of ours is to be the way of others.
    *("RemoteCommand=none", "PermitLocalCommand=no", "ClearAllForwardings=yes", "ControlMaster=no"),
)
FAILED = 255  # ssh's own exit code
FULL = "Session open refused by peer"  # before it tries to log in anew
LONGEST = 1 << 12  # of what it says before
ENDS_SECONDS = 2.0  # after it has closed its output


class OwnSsh(ProcessConnection):
    """A node that the user's own ssh reaches; `error` is why paramiko does not."""

    shell = ()  # sshd starts the login's

    def __init__(
        self, program: tuple[str, ...], address: str, by_hand: str, error: NodeError | None
    ) -> None:
        super().__init__(program, address)
        self.channel = functools.partial(OwnSshChannel, self)
        self.by_hand = by_hand
        self.error = error

    def environment(self) -> dict[str, str]:
        return {**os.environ, "SSH_ASKPASS_REQUIRE": "never"}

    @property
    def alive(self) -> bool:
        return all(channel.code != FAILED for channel in self.open)

    def refusal(self, complaints: str) -> NodeError:
        """Return why ssh did not get there."""
        said = server_command.last_line(complaints) or f"exit code {FAILED}"
        fix = f"try: {self.by_hand}"
        if self.error:
            return NodeError(f"{self.error.what}; ssh itself says: {said}", self.error.fix or fix)
        if FULL in complaints:
            said, fix = FULL, "MaxSessions in its sshd_config limits the commands at a time"
        return NodeError(f"your own ssh, which is logged in there, says: {said}", fix)


class OwnSshChannel(ProcessChannel):
    """A session of the user's own ssh, which may fail before its command begins."""

    def __init__(
        self,
        connection: OwnSsh,
        both: socket.socket,
        stderr: socket.socket,
        timeout: float,
        process: subprocess.Popen[bytes],
    ) -> None:
        super().__init__(both, stderr, timeout, process)
        self.connection = connection
        self.heard = False
        self.complaints = b""

    def recv(self, nbytes: int, /) -> bytes:
        data = super().recv(nbytes)
        if not data and not self.heard and self.has_failed():
            while self.recv_stderr_ready() and self.recv_stderr(1 << 16):
                pass
            raise self.connection.refusal(self.complaints.decode(errors="replace"))
        self.heard = True
        return data

    def recv_stderr(self, nbytes: int, /) -> bytes:
        data = super().recv_stderr(nbytes)  # another task may be the reader
        self.complaints = (self.complaints + data)[-LONGEST:] if not self.heard else b""
        return data

    def has_failed(self) -> bool:
        """Wait a moment for its end: a program there may close its output and go on."""
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(ENDS_SECONDS) == FAILED
        return False

    def recv_exit_status(self) -> int:
        code = super().recv_exit_status()
        return -1 if code == FAILED else code


def by_ssh(
    destination: Destination,
    file: Path | None,
    timeout: float,
    *,
    strict: bool,
    error: NodeError | None = None,
) -> OwnSsh | None:
    """Return a node that ssh itself reaches; None where there is no ssh."""
    program = shutil.which("ssh")
    if program is None:
        return None
    checking = "accept-new"  # as ours do
    if strict or destination.strict or destination.lax:
        checking = "yes" if strict or destination.strict else "no"
    limit = max(1, round(timeout))
    options = (*OPTIONS, f"StrictHostKeyChecking={checking}", f"ConnectTimeout={limit}")
    path = destination.control_path.replace("%", "%%")
    config = ("-F", str(file)) if file else ()
    there = (*("-l", destination.user, "-p", str(destination.port)), "--", destination.name)
    words = [program, *config, *(("-S", path) if path else ()), "-T", "-a", "-x", "-e", "none"]
    words += [word for option in options for word in ("-o", option)]
    by_hand = shlex.join(("ssh", *config, *there, "true"))
    return OwnSsh((*words, *there), address_of(destination, timeout), by_hand, error)


def address_of(destination: Destination, timeout: float) -> str:
    """Return the address that ssh calls; nothing where the way there leads through others."""
    if destination.jump or destination.proxy_command:
        return ""
    where = (destination.host, destination.port)
    ask = functools.partial(socket.getaddrinfo, *where, type=socket.SOCK_STREAM)
    try:
        return str(tasks.aside(ask, timeout)[0][4][0])
    except (OSError, TimeoutError):
        return ""
