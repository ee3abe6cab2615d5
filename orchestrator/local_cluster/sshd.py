"""Run one sshd as the user that we are: its program, configuration, keys and first answer.

For clusters on one machine: cluster.py, and the network namespaces of the tests.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from orchestrator.common.errors import CheckFailed

START_SECONDS = 20.0  # an sshd listens 20 ms after its start; this is for a busy machine
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
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # elsewhere a boot script makes it
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
    """Make an ed25519 key at `path` (0.1 ms; ssh-keygen takes 5) and return its public line."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(private)
    return public.decode() + "\n"


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
        port = 0
        held: list[socket.socket] = []
        try:
            for address in addresses:
                held.append(socket.socket())
                held[-1].bind((address, port))
                port = int(held[-1].getsockname()[1])
            return port
        except OSError:
            continue
        finally:
            for listener in held:
                listener.close()
    raise CheckFailed("no port is free on all loopback addresses", "choose one with a fixed port")


def await_banner(address: str, port: int, ended: Callable[[], bool], log: Path) -> None:
    """Return once an sshd answers at the address; raise its last message if it ended instead."""
    deadline = time.monotonic() + START_SECONDS
    while not ended() and time.monotonic() < deadline:
        try:
            with socket.create_connection((address, port), timeout=2.0) as link:
                if link.recv(4) == b"SSH-" and not ended():
                    return
        except OSError:
            time.sleep(0.005)  # not bound yet, and there is no event to wait for
    output = log.read_text(errors="replace").strip() if log.exists() else ""
    if "already in use" in output:
        raise CheckFailed(
            f"{address}:{port} is taken by another program",
            f"choose another port, or see who holds it: ss -ltnp 'sport = :{port}'",
        )
    state = "ended at once" if ended() else f"was silent for {START_SECONDS:.0f} s"
    raise CheckFailed(f"sshd at {address}:{port} {state}: {output or 'no message'}")


def account() -> str:
    """Return the name to log in with: the current user id's, whatever $USER says."""
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
    return any(line.startswith(f"{account()}:!") for line in shadow.read_text().splitlines())
