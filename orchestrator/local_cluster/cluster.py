"""A cluster on this machine: real sshd on 127.0.0.2, .3, ... run by anybody, root or not.

`orchestrator demo` and the tests use it. Every node has a directory of its own for what a machine
has to itself: host key, home, our own state. The next cluster in the same
directory ends the processes that a kill -9 left running.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import site
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.errors import CheckFailed
from orchestrator.node.job import processes


@dataclass(frozen=True)
class LoopbackNode:
    """One sshd and the directory that stands for its machine."""

    address: str
    port: int
    directory: Path

    @property
    def home(self) -> Path:
        """Return the $HOME of everything that runs on this node."""
        return self.directory / "home"

    @property
    def state(self) -> Path:
        """Return the $ORCHESTRATOR_HOME of its processes, by which the keeper knows them."""
        return self.directory / "state"

    @property
    def log(self) -> Path:
        """Return the log of its sshd."""
        return self.directory / "sshd.log"


class LoopbackCluster:
    """`with LoopbackCluster(2, directory) as cluster: ...`; nodes are counted from 0."""

    def __init__(self, size: int, directory: Path, *, slots: int | None = None) -> None:
        self.directory = directory.absolute()
        self.addresses = [f"127.0.0.{2 + i}" for i in range(size)]
        self.slots = slots
        self.nodes: list[LoopbackNode] = []
        self.key = self.directory / "key"
        self.known_hosts = self.directory / "known_hosts"
        self.node_list = self.directory / "node_ip_list.txt"
        self.ssh_config = self.directory / "ssh_config"
        self._program = ""
        self._options: list[str] = []
        self._listeners: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> LoopbackCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start every sshd, and wait until all answer; an error leaves nothing running."""
        self._program = sshd_program()
        # An earlier cluster in this directory may have been killed and have left processes.
        kill_cluster(self.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o700)
        port = free_port(self.addresses)
        self.nodes = [
            LoopbackNode(address, port, self.directory / f"node{i}")
            for i, address in enumerate(self.addresses)
        ]
        self._write()
        self._options = penalty_options(self._program, self.nodes[0].directory / "sshd_config")
        try:
            for i in range(len(self.nodes)):
                self._spawn(i)
            for i in range(len(self.nodes)):
                self._await(i)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every sshd, every session and all that they started. May be called again."""
        kill_cluster(self.directory)
        for listener in self._listeners.values():
            listener.wait()
        self._listeners.clear()

    def reboot(self, i: int, memory: Path) -> None:
        """Kill all that runs on a node, remove what its memory held, and start its sshd again."""
        kill_cluster(self.nodes[i].directory, "/")
        self._listeners[i].wait()
        shutil.rmtree(memory, ignore_errors=True)
        self._spawn(i)
        self._await(i)

    def environment(self, node: LoopbackNode) -> dict[str, str]:
        """Return the environment of a session on `node`: its own home, and this Python first."""
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        environment = {
            "HOME": str(node.home),
            "ORCHESTRATOR_HOME": str(node.state),
            "ORCHESTRATOR_CLAIMS": str(node.directory / "claims"),
            "PATH": path,
        }
        # `pip install --user` packages are looked up in $HOME, which is another one here.
        if site.ENABLE_USER_SITE:
            environment["PYTHONUSERBASE"] = site.getuserbase()
        return environment

    def _write(self) -> None:
        authorized = write_key(self.key)
        known = []
        for node in self.nodes:
            for path in (node.directory, node.home):
                path.mkdir(mode=0o700, exist_ok=True)
            known.append(f"[{node.address}]:{node.port} {write_key(node.directory / 'host_key')}")
            node.log.write_text("")
            (node.directory / "authorized_keys").write_text(authorized)
            text = sshd_config(node.address, node.port, node.directory, self.environment(node))
            (node.directory / "sshd_config").write_text(text)
        self.known_hosts.write_text("".join(known))
        ending = f" slots={self.slots}" if self.slots else ""
        self.node_list.write_text("".join(f"{a}{ending}\n" for a in self.addresses))
        self.ssh_config.write_text(
            client_config(self.nodes[0].port, self.key, self.known_hosts, own_login())
        )

    def _spawn(self, i: int) -> None:
        self._listeners[i] = subprocess.Popen(
            self.listener(self.nodes[i]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def listener(self, node: LoopbackNode) -> list[str]:
        """Return the command of a node's sshd."""
        config = str(node.directory / "sshd_config")
        return [self._program, "-D", "-f", config, "-E", str(node.log), *self._options]

    def _await(self, i: int) -> None:
        node = self.nodes[i]
        listener = self._listeners[i]
        await_banner(node.address, node.port, lambda: listener.poll() is not None, node.log)


def kill_cluster(directory: Path, ending: str = "/node") -> None:
    """End every process that belongs to the cluster in `directory`, or with "/" to that node."""
    mark = f"{directory}{ending}".encode()
    spared = {os.getpid()}
    # One round is enough, unless a process forks during it.
    for _ in range(20):
        pids = {int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()} - spared
        ours = {pid for pid in pids if _belongs(pid, mark)}
        if not ours:
            return
        spared |= kill_processes(ours)


def kill_processes(pids: Iterable[int]) -> set[int]:
    """Kill these processes, wait until they are dead, and return those that may not be killed."""
    known = [process for process in map(processes.find_process, pids) if process]
    sent = [process for process in known if processes.send_signal(process, signal.SIGKILL)]
    processes.wait_for_end(sent, 5.0)
    return {process.pid for process in known if process not in sent}


def _belongs(pid: int, mark: bytes) -> bool:
    """Return True for an sshd with a file under `mark`, and for what has its state there."""
    if b"ORCHESTRATOR_HOME=" + mark in processes.file_contents(f"/proc/{pid}/environ"):
        return True
    command = processes.file_contents(f"/proc/{pid}/cmdline")
    return b"sshd" in command.split(mark)[0] and mark in command and b"-D" in command


# -- sshd ---------------------------------------------------------------------------------------
# Run one sshd as the user that we are: its program, configuration, keys and first answer.

# An sshd listens 20 ms after its start; a busy machine needs longer.
START_SECONDS = 20.0
PROGRAMS = ("/usr/sbin/sshd", "/usr/bin/sshd", "/usr/local/sbin/sshd", "/sbin/sshd")

CONFIG = """\
Port {port}
ListenAddress {address}
HostKey "{directory}/host_key"
PidFile "{directory}/sshd.pid"
AuthorizedKeysFile "{directory}/authorized_keys"
AuthenticationMethods publickey
PasswordAuthentication no
UsePAM {pam}
StrictModes no
UseDNS no
PrintMotd no
PrintLastLog no
Subsystem sftp internal-sftp
SetEnv {environment}
"""


def sshd_program() -> str:
    """Return the absolute path of sshd, which refuses to be started by any other name."""
    if not sys.platform.startswith("linux"):
        raise CheckFailed(
            "a cluster on loopback addresses needs Linux", "run it on a Linux machine"
        )
    program = next((p for p in PROGRAMS if os.access(p, os.X_OK)), shutil.which("sshd"))
    if program is None:
        raise CheckFailed(
            "there is no sshd on this machine",
            "install it: apt-get install openssh-server (dnf install openssh-server)",
        )
    if os.geteuid() == 0:
        # On other machines a boot script creates this directory.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    return program


def sshd_config(address: str, port: int, directory: Path, environment: Mapping[str, str]) -> str:
    """Return the configuration of one sshd whose keys, log and pid file are in `directory`."""
    return CONFIG.format(
        port=port,
        address=address,
        directory=directory,
        pam="yes" if _locked_account() else "no",
        environment=" ".join(f'"{name}={value}"' for name, value in environment.items()),
    )


def client_config(port: int, key: Path, known_hosts: Path, user: str) -> str:
    """Return a file for `ssh -F` that reaches the nodes by address and never asks."""
    return (
        f"Host *\n    User {user}\n    Port {port}\n    BatchMode yes\n    IdentitiesOnly yes\n"
        f'    IdentityFile "{key}"\n    UserKnownHostsFile "{known_hosts}"\n'
        "    GlobalKnownHostsFile /dev/null\n"
    )


def write_key(path: Path) -> str:
    """Create an ed25519 key at `path` and return its public line."""
    path.unlink(missing_ok=True)
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", path], check=True
    )
    return path.with_name(f"{path.name}.pub").read_text()


def penalty_options(program: str, config: Path) -> list[str]:
    """Disable sshd's penalties (since 9.8) for an address that failed often: all share one."""
    option = ["-o", "PerSourcePenalties=no"]
    known = subprocess.run(
        [program, "-t", "-f", str(config), *option], capture_output=True, check=False
    )
    return option if known.returncode == 0 else []


def free_port(addresses: Iterable[str]) -> int:
    """Return a port that is free on all of `addresses`."""
    for _ in range(20):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            port = 0
            for address in addresses:
                listener = held.enter_context(socket.create_server((address, port)))
                port = int(listener.getsockname()[1])
            return port
    raise CheckFailed("no port is free on all loopback addresses", "end what listens there")


def await_banner(address: str, port: int, ended: Callable[[], bool], log: Path) -> None:
    """Return once an sshd answers at the address; raise its last message if it ended instead."""
    deadline = time.monotonic() + START_SECONDS
    while not ended() and time.monotonic() < deadline:
        try:
            with socket.create_connection((address, port), timeout=2.0) as link:
                if link.recv(4) == b"SSH-" and not ended():
                    return
        except OSError:
            # The port is not bound yet, and there is no event to wait for.
            time.sleep(0.005)
    output = log.read_text(errors="replace").strip() if log.exists() else ""
    state = "ended at once" if ended() else f"was silent for {START_SECONDS:.0f} s"
    raise CheckFailed(f"sshd at {address}:{port} {state}: {output or 'no message'}")


def own_login() -> str:
    """Return the login name of the current user id, independent of $USER."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise CheckFailed(
            f"user id {os.geteuid()} has no account, and sshd accepts no login without one",
            "add a line for it to /etc/passwd (containers started with --user often lack it)",
        ) from None


def _locked_account() -> bool:
    """Return whether the password is locked ('!'): root then gets in by key only with PAM."""
    shadow = Path("/etc/shadow")
    if os.geteuid() != 0 or not shadow.exists():
        return False
    return any(line.startswith(f"{own_login()}:!") for line in shadow.read_text().splitlines())
