"""Reaches a node by the user's own ssh program, for features that only OpenSSH has.

It never prompts the user. A session uses a connection that the user has open (ControlMaster), or
logs in as ssh_config says. Every session is a process.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import threading
from pathlib import Path

from orchestrator.common.errors import NodeError
from orchestrator.head.connect.ssh_config import Destination
from orchestrator.head.connect.subprocess_transport import ProcessChannel, ProcessConnection
from orchestrator.head.connect.way import Way

OPTIONS = (
    *("BatchMode=yes", "LogLevel=INFO", "ServerAliveInterval=15"),
    # Options for terminals are turned off, and a session of ours does not become a master.
    *("RemoteCommand=none", "PermitLocalCommand=no", "ClearAllForwardings=yes", "ControlMaster=no"),
)
# The exit code of ssh's own failures.
FAILED = 255
# The limit of ssh's output before the command begins; a tenth of that is shown.
LONGEST = 4000
# The time that ssh gets to exit after it has closed its output.
ENDS_SECONDS = 2.0
CONTROL_PATH = "write `ControlPath ~/.ssh/cm-%C` at the top of ~/.ssh/config, then "
# (pattern of ssh's output, meaning, fix). ssh has one exit code for all of these.
MEANINGS = (
    (
        "Session open refused by peer",
        "your ssh, which is logged in there, may open no further session",
        "MaxSessions in its sshd_config limits the commands at a time",
    ),
    (r"revoked by file (.*\S)", "its host key is revoked in {}", "do not connect to it"),
    ("REVOKED HOST KEY", "its host key is revoked in your known_hosts", "do not connect to it"),
    (
        r"IDENTIFICATION HAS CHANGED[\s\S]*Offending .* key in (.*\S)",
        "its host key has changed: see {}",
        "if you know that it was reinstalled, remove that line; if not, someone may be intercepting"
        " the connection",
    ),
    (
        r"No (\S+) host key is known",
        "its host key is not known ({})",
        "let ssh ask once, with -o StrictHostKeyChecking=ask, and compare the fingerprint",
    ),
    (
        r'Load key "(.*)": bad permissions',
        "{} is open to others, and therefore not used",
        "chmod 600 it",
    ),
    (
        "jumphost loop",
        "the ProxyJump of your ssh_config leads back to the same machine",
        "give the jump host a block of its own, with ProxyJump none, above that line",
    ),
    (
        "Unable to negotiate",
        "its sshd and ssh have no common algorithm",
        "look at HostKeyAlgorithms, KexAlgorithms, Ciphers and MACs in both configurations",
    ),
    ("Invalid key length", "its host key is shorter than RequiredRSASize allows", ""),
    ("Connection refused", "it refuses connections", "is sshd running there, and on this port?"),
    (
        "during banner exchange",
        "it accepts the connection, then hangs in the SSH handshake",
        "is that port really its sshd?",
    ),
    ("timed out|timeout", "it does not answer", "is it up? does a firewall drop the packets?"),
    ("Could not resolve hostname", "its name cannot be resolved", "check its spelling"),
)
# sshd would have asked for a password next.
TAKES_PASSWORDS = re.compile(r"Permission denied \(\S*(password|keyboard-interactive)")
# Lines of ssh's warnings without information about this host.
NOISE = re.compile(
    "@|Warning: Permanently|Host key verification failed|IT IS POSSIBLE|Someone could|It is also"
)


class SshProcess(ProcessConnection):
    """A connection by the ssh program; `error` is the reason why fabric failed, if it did."""

    # sshd starts the login shell.
    shell = ()

    def __init__(
        self,
        program: tuple[str, ...],
        address: str,
        way: Way,
        by_hand: str,
        error: NodeError | None,
    ) -> None:
        super().__init__(program, address, way)
        self.by_hand = by_hand
        self.error = error

    def environment(self) -> dict[str, str]:
        return {**os.environ, "SSH_ASKPASS_REQUIRE": "never"}

    def channel(
        self, both: socket.socket, stderr: socket.socket, process: subprocess.Popen[bytes]
    ) -> SshSession:
        return SshSession(self, both, stderr, process)

    @property
    def alive(self) -> bool:
        return all(channel.code != FAILED for channel in self.open)

    def refusal(self, complaints: str) -> NodeError:
        """Return the error for a failed ssh; without a known cause it is fabric's error."""
        lines = [line.strip() for line in complaints.splitlines() if not NOISE.match(line)]
        said = "; ".join(lines[-3:])[-LONGEST // 10 :] or f"exit code {FAILED}"
        copies = TAKES_PASSWORDS.search(complaints) is not None
        fix = "copy your key there with ssh-copy-id, or " * copies + f"try: {self.by_hand}"
        for pattern, meaning, remedy in MEANINGS:
            if found := re.search(pattern, complaints):
                what = f"{meaning.format(*found.groups())}; ssh itself says: {said}"
                stop = " " if remedy.endswith("?") else "; "
                return NodeError(what, f"{remedy}{stop}{fix}" if remedy else fix)
        if self.error is None:
            return NodeError(f"ssh itself says: {said}", fix)
        return NodeError(f"{self.error.what}; ssh itself says: {said}", self.error.fix or fix)


class SshSession(ProcessChannel):
    """A session of the ssh program, which may fail before its command begins."""

    def __init__(
        self,
        connection: SshProcess,
        both: socket.socket,
        stderr: socket.socket,
        process: subprocess.Popen[bytes],
    ) -> None:
        super().__init__(both, stderr, process)
        self.connection = connection
        self.heard = False
        self.complaints = b""
        # A piece that is read is appended to `complaints` under the same lock.
        self.reading = threading.Lock()

    def recv(self, nbytes: int, /) -> bytes:
        data = super().recv(nbytes)
        if not data and not self.heard and self.has_failed():
            with contextlib.suppress(OSError):
                # Received data can still be read.
                self.stderr.shutdown(socket.SHUT_RD)
                while self.recv_stderr(1 << 16):
                    pass
            raise self.connection.refusal(self.complaints.decode(errors="replace"))
        self.heard = True
        return data

    def recv_stderr(self, nbytes: int, /) -> bytes:
        # Another thread may be reading.
        with self.reading:
            data = super().recv_stderr(nbytes)
            self.complaints = (self.complaints + data)[-LONGEST:] if not self.heard else b""
        return data

    def has_failed(self) -> bool:
        """Return True if ssh itself failed; a remote program may close its output and go on."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(ENDS_SECONDS) == FAILED
        return False

    def recv_exit_status(self) -> int:
        code = super().recv_exit_status()
        return -1 if code == FAILED else code


def ssh_connection(
    destination: Destination,
    file: Path | None,
    timeout: float,
    way: Way,
    *,
    strict: bool,
    error: NodeError | None = None,
) -> SshProcess:
    """Return a connection whose sessions are ssh processes; nothing is started yet.

    Each session logs in, or uses the user's own ControlMaster.
    """
    checking = "accept-new" if destination.checking == "ask" else destination.checking
    # ssh must report its reason before our own timeout.
    limit = max(1, int(0.8 * timeout))
    options = (*OPTIONS, f"StrictHostKeyChecking={'yes' if strict else checking}")
    path = destination.control_path.replace("%", "%%")
    config = ("-F", str(file)) if file else ()
    there = (*("-l", destination.user, "-p", str(destination.port)), "--", destination.name)
    words = [shutil.which("ssh") or "ssh", *config, *(("-S", path) if path else ())]
    words += ["-T", "-a", "-x", "-e", "none"]
    words += [word for option in (*options, f"ConnectTimeout={limit}") for word in ("-o", option)]
    by_hand = shlex.join(("ssh", *config, *there, "true"))
    return SshProcess((*words, *there), address_of(destination), way, by_hand, error)


def manual_login_hint(destination: Destination) -> str:
    """Return the hint to open a ControlMaster connection by hand, which sessions then use."""
    where = "" if destination.control_path else CONTROL_PATH
    there = f"-p {destination.port} {destination.user}@{destination.name or destination.host}"
    return f"{where}log in by hand once, and all commands go by that: ssh -fNM {there}"


def address_of(destination: Destination) -> str:
    """Return the destination's IP address, or "" for a name, which only ssh resolves."""
    through = destination.jump or "proxycommand" in destination.settings
    is_address = re.fullmatch(r"[0-9.]+|[0-9a-fA-F:.]*:.*", destination.host)
    return destination.host if is_address and not through else ""
