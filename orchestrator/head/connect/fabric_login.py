"""Logs in by unmodified fabric and paramiko; each error has a fix.

This module adds the order of keys, the check of known_hosts, and the text of errors.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shlex
import socket
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fabric
import paramiko
from paramiko.auth_strategy import (
    AuthFailure,
    AuthSource,
    AuthStrategy,
    InMemoryPrivateKey,
    OnDiskPrivateKey,
)

from orchestrator.common.errors import NodeError, NoKey, OrchestratorError
from orchestrator.head.connect import known_hosts, openssh
from orchestrator.head.connect.ssh_config import Destination
from orchestrator.head.connect.transport import (
    Channel,
    Dropped,
    NeedsSsh,
    notice_loss,
    seconds_left,
)
from orchestrator.head.connect.way import Way

log = logging.getLogger(__name__)
# Without a handler, Python prints paramiko's log of each connection that fails.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

KEEPALIVE_SECONDS = 15
# The time limit for the agent's list of keys.
AGENT_SECONDS = 5.0
# The interval at which the thread of an idle connection wakes up.
WAKE_SECONDS = 5.0
# An error within this time of the deadline counts as a timeout.
NEARLY_SECONDS = 0.2
# A link is closed after this time without acknowledgements.
LINK_SECONDS = 60.0
WINDOW_BYTES = 1 << 21
LONGEST_BANNER = 300
FAST_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
# OPEN_ADMINISTRATIVELY_PROHIBITED: the server's configuration forbids the channel.
PROHIBITED = 1


class FabricChannel:
    """A paramiko channel that raises only OSErrors, as a socket does."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self.channel = channel
        self.settimeout, self.recv = channel.settimeout, channel.recv
        self.recv_stderr, self.recv_stderr_ready = channel.recv_stderr, channel.recv_stderr_ready
        self.recv_exit_status = channel.recv_exit_status

    def sendall(self, s: bytes, /) -> None:
        with broken_link():
            self.channel.sendall(s)

    def shutdown_write(self) -> None:
        with contextlib.suppress(ConnectionError), broken_link():
            self.channel.shutdown_write()

    def close(self) -> None:
        with contextlib.suppress(ConnectionError), broken_link():
            self.channel.close()


@contextlib.contextmanager
def broken_link() -> Iterator[None]:
    try:
        yield
    except (paramiko.SSHException, EOFError) as error:
        raise ConnectionError(str(error) or "it hung up") from error


class FabricConnection:
    """An open fabric connection to one machine."""

    def __init__(
        self, connection: fabric.Connection, chosen: Way, through: FabricConnection | None
    ) -> None:
        self.fabric = connection
        self.transport: paramiko.Transport = connection.transport
        self.way = chosen
        # The connection to the jump host, which must not be closed before this one.
        self.through = through
        self.transport.set_keepalive(KEEPALIVE_SECONDS)
        sock = self.transport.sock
        # Paramiko's default of 0.1 s would wake the thread far more often.
        sock.settimeout(WAKE_SECONDS)
        self.address = ""
        # Behind a jump host, `sock` is a channel of its connection.
        if isinstance(sock, socket.socket):
            self.address = str(sock.getpeername()[0])
            notice_loss(self, LINK_SECONDS)

    def run(self, command: str, timeout: float) -> Channel:
        """Start a command and return its channel, which the caller reads and writes."""
        try:
            with in_protocol():
                channel = self.transport.open_session(window_size=WINDOW_BYTES, timeout=timeout)
                channel.settimeout(timeout)
                channel.exec_command(command)
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise NodeError(
                f"it lets us in, but no command can be started there ({error})",
                "check MaxSessions in its sshd_config and the login shell of this user",
            ) from error
        return FabricChannel(channel)

    @property
    def alive(self) -> bool:
        return self.transport.is_active()

    def close(self) -> None:
        """Close the connection without waiting for its thread, which may sleep for seconds."""
        sock = self.transport.sock
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            if isinstance(sock, socket.socket):
                sock.shutdown(socket.SHUT_RDWR)
            else:
                # This is a channel of the jump host's connection.
                sock.close()
        self.transport.close()


@contextlib.contextmanager
def in_protocol() -> Iterator[None]:
    """Raise a NodeError for any unexpected exception of paramiko: the node sent invalid data."""
    try:
        yield
    except (paramiko.SSHException, EOFError, OSError, OrchestratorError):
        raise
    except Exception as error:
        raise NodeError(
            f"it does not speak the SSH protocol ({type(error).__name__}: {error})",
            "is it really an sshd that answers there?",
        ) from error


def no_way_on(destination: Destination, error: Exception) -> NodeError:
    """Return the error for a jump host that cannot reach the destination, with a fix."""
    jump, where = destination.jump.rpartition(",")[2], f"{destination.host}:{destination.port}"
    if isinstance(error, paramiko.ChannelException) and error.code == PROHIBITED:
        return NodeError(
            f"the jump host {jump} may not connect us to {where}",
            "allow it in its sshd_config: AllowTcpForwarding yes, and no PermitOpen that"
            " excludes it",
        )
    reason = error.text if isinstance(error, paramiko.ChannelException) else str(error)
    return NodeError(
        f"the jump host {jump} cannot reach {where} ({reason})",
        f"try it on the jump host: ssh -p {destination.port} {destination.host}",
    )


# -- the login --------------------------------------------------------------------------------


def prepare_connection(
    destination: Destination, gateway: fabric.Connection | bool
) -> fabric.Connection:
    """Return an unopened fabric connection with the login of ssh_config and the known keys."""
    lines = known_hosts.lines_about(destination)
    if not lines:
        raise NodeError(
            "its host key is not known, and there is no ssh here to ask for it",
            "install it (Debian, Ubuntu: apt-get install openssh-client)",
        )
    connection = fabric.Connection(
        destination.host,
        user=destination.user,
        port=destination.port,
        # Each connection writes into its own Config; ssh_config was read by `ssh -G`.
        config=fabric.Config(overrides={"load_ssh_configs": False}, lazy=True),
        gateway=gateway,
        connect_kwargs={
            "auth_strategy": SshKeys(destination),
            "transport_factory": functools.partial(new_transport, [line.kind for line in lines]),
        },
    )
    connection.client.set_missing_host_key_policy(paramiko.RejectPolicy())
    port = destination.port
    name = destination.host if port == 22 else f"[{destination.host}]:{port}"
    for line in lines:
        with contextlib.suppress(paramiko.SSHException, paramiko.pkey.UnknownKeyType, ValueError):
            key = paramiko.PKey.from_type_string(line.kind, line.blob)
            connection.client.get_host_keys().add(name, line.kind, key)
    return connection


class PromptSocket(socket.socket):
    """A TCP socket that acknowledges what it receives at once: a login takes 40 ms less.

    sshd holds back its next packet until the last one is acknowledged (Nagle's algorithm), and
    Linux delays an acknowledgement by 40 ms.
    """

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        data = super().recv(size, flags)
        if hasattr(socket, "TCP_QUICKACK"):
            # Linux turns the option off again by itself.
            self.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return data


def new_transport(known: Sequence[str], sock: socket.socket, **options: Any) -> paramiko.Transport:
    """Return a paramiko Transport that prefers the known kinds of host key and fast ciphers."""
    # Behind a jump host, `sock` is a channel of its connection.
    if isinstance(sock, socket.socket):
        sock = PromptSocket(fileno=sock.detach())
        # Before the handshake: our packets would also wait 40 ms for an acknowledgement.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    transport = paramiko.Transport(sock, **options)
    security = transport.get_security_options()
    ciphers, kinds = security.ciphers, security.key_types
    security.ciphers = tuple(sorted(ciphers, key=lambda name: name not in FAST_CIPHERS))
    first = [kind.replace("ssh-rsa", "rsa-sha2-512") for kind in known]
    security.key_types = tuple(sorted(kinds, key=lambda name: name not in first))
    return transport


def log_in(
    destination: Destination,
    deadline: float,
    chosen: Way,
    through: FabricConnection | None,
) -> FabricConnection:
    """Connect, check the host's key, and log in with the user's keys."""
    gateway = False if through is None else through.fabric
    connection, seconds = prepare_connection(destination, gateway), seconds_left(deadline)
    limits = ("timeout", "banner_timeout", "auth_timeout", "channel_timeout")
    connection.connect_kwargs.update(dict.fromkeys(limits, seconds))
    try:
        with in_protocol():
            result = connection.open()
        if more := result[-1].result:
            raise wants_more(destination, more)
        return FabricConnection(connection, chosen, through)
    except BaseException as error:
        failure = explain_login_error(error, connection, destination, deadline)
        connection.client.close()
        raise failure from error


def explain_login_error(
    error: BaseException, connection: fabric.Connection, destination: Destination, deadline: float
) -> BaseException:
    """Return the error to raise for a failed login: a known cause with a fix, else `error`."""
    match error:
        case paramiko.BadHostKeyException():
            return NeedsSsh("its host key is not the one in known_hosts")
        case paramiko.ssh_exception.IncompatiblePeer():
            return NeedsSsh(
                f"its sshd and our client have no common algorithm: {error}",
                "look at HostKeyAlgorithms, KexAlgorithms, Ciphers and MACs in both configurations",
            )
        case AuthFailure():
            return refused_error(connection, destination, error.result, deadline)
        case paramiko.ChannelException():
            return no_way_on(destination, error)
        case socket.gaierror():
            return NodeError(
                "its name cannot be resolved",
                f"check the spelling of {destination.host!r}, /etc/hosts, ssh_config",
            )
        case paramiko.ssh_exception.NoValidConnectionsError():
            return unreachable_error(destination, next(iter(error.errors.values())))
        # The SSH handshake had not begun.
        case OSError() if connection.client.get_transport() is None:
            return unreachable_error(destination, error)
        case paramiko.SSHException() | EOFError() | OSError():
            if time.monotonic() < deadline - NEARLY_SECONDS:
                return Dropped(str(error) or "end of file")
            return NodeError(
                "it accepts the connection, then hangs in the SSH handshake",
                f"is port {destination.port} really its sshd? try: ssh -v -p {destination.port} "
                f"{destination.user}@{destination.host}",
            )
    return error


def unreachable_error(destination: Destination, error: Exception) -> NodeError:
    """Return the error for a host to which no TCP connection could be made."""
    if isinstance(error, ConnectionRefusedError):
        return NodeError(
            f"it refuses connections on port {destination.port}",
            "is sshd running there, and on this port? write host:port in the list for another port",
        )
    if isinstance(error, TimeoutError):
        return NodeError(
            f"it does not answer on port {destination.port}",
            "is it up? does a firewall drop the packets?",
        )
    return NodeError(f"there is no route to it: {getattr(error, 'strerror', None) or error}")


def wants_more(destination: Destination, more: Sequence[str]) -> NodeError:
    return NodeError(
        f"after the key it also wants {', '.join(more)}, which cannot be asked here",
        f"{openssh.manual_login_hint(destination)}; or have {destination.user} let in by a key"
        " alone, in its sshd_config: Match Address HEAD, then AuthenticationMethods publickey",
    )


class SshKeys(AuthStrategy):
    """The keys of ssh_config and of the agent, in the order of ssh: the config's first."""

    def __init__(self, destination: Destination) -> None:
        super().__init__(ssh_config=paramiko.SSHConfig())
        self.destination = destination
        # (reason, fix) of each key that cannot be used.
        self.unusable: list[tuple[str, str]] = []

    def get_sources(self) -> Iterator[AuthSource]:
        there, offered = self.destination, set[bytes]()
        for path in there.keys:
            found = load_key(path)
            if isinstance(found, tuple):
                self.unusable.append(found)
            elif found is not None:
                offered.add(found.asbytes())
                yield OnDiskPrivateKey(there.user, "ssh-config", path, found)
        wanted = {public_blob(path) for path in there.keys}
        keys = [key for key in agent_keys() if key.asbytes() not in offered]
        # Servers hang up after a few keys. Those of the config come first; a security key comes
        # last, as it has to be touched before the server has accepted the key.
        keys.sort(key=lambda key: (key.asbytes() not in wanted, key.get_name().startswith("sk-")))
        for key in keys:
            if key.asbytes() in wanted or not there.only_these_keys:
                yield InMemoryPrivateKey(there.user, key)


def agent_keys() -> list[paramiko.AgentKey]:
    """Return the keys of the user's agent, over a connection of its own."""
    if os.environ.get("SSH_AUTH_SOCK") and agent_answers():
        with contextlib.suppress(paramiko.SSHException, OSError):
            return list(paramiko.Agent().get_keys())
    return []


@functools.cache
def agent_answers() -> bool:
    """Return False for an agent that hangs: paramiko waits for it without a limit."""

    def ask() -> None:
        with contextlib.suppress(paramiko.SSHException, OSError):
            paramiko.Agent().close()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(AGENT_SECONDS)
    if thread.is_alive():
        log.warning("the SSH agent does not answer, and its keys are not used")
    return not thread.is_alive()


def public_blob(path: Path) -> bytes:
    """Return the public key of an IdentityFile, or b"" without one.

    The private key may be in the agent alone.
    """
    path = path if path.suffix == ".pub" else path.with_name(path.name + ".pub")
    try:
        return paramiko.pkey.PublicBlob.from_file(str(path)).key_blob
    except (OSError, ValueError, IndexError):
        return b""


@functools.cache
def load_key(path: Path) -> paramiko.PKey | tuple[str, str] | None:
    """Return the key in a file, a (reason, fix) if it is unusable, or None without a file."""
    try:
        # The agent may have the private key.
        if path.suffix == ".pub" or not path.is_file():
            return None
        status = path.stat()
        if status.st_uid == os.getuid() and status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            reason = f"{path} is open to others, mode {mode:04o}, and therefore not used"
            return reason, f"chmod 600 {shlex.quote(str(path))}"
        return paramiko.PKey.from_path(path)
    except PermissionError:
        return f"{path} cannot be read", ""
    except (paramiko.PasswordRequiredException, TypeError):
        # The cryptography package raises TypeError for a key with a passphrase.
        agent = "" if os.environ.get("SSH_AUTH_SOCK") else 'eval "$(ssh-agent -s)"; '
        return f"{path} needs a passphrase", f"{agent}ssh-add {shlex.quote(str(path))}"
    # Each format of key has exceptions of its own.
    except Exception as error:  # noqa: BLE001
        return f"{path} is not a key that paramiko reads ({error})", ""


def label_of(source: Any) -> str:
    """Return the name of a key: its file, or its comment in the agent."""
    if isinstance(source, OnDiskPrivateKey):
        return str(source.path)
    return f"agent: {source.pkey.comment or source.pkey.get_name()}"


def refused_error(
    connection: fabric.Connection,
    destination: Destination,
    results: Sequence[Any],
    deadline: float,
) -> Exception:
    """Return the error for a failed login, from the result of each key."""
    transport, keys = connection.client.get_transport(), connection.connect_kwargs["auth_strategy"]
    said = " ".join((transport.get_banner() or b"").decode(errors="replace").split())
    if time.monotonic() >= deadline - NEARLY_SECONDS:
        if said:
            return NodeError(
                f"it hangs during the login, and says: {said[-LONGEST_BANNER:]}",
                "do what it says while it connects, with a longer --connect-timeout",
            )
        return NodeError(
            "it hangs during the login",
            "a slow directory or PAM there? --connect-timeout 60 waits longer; try: ssh to it",
        )
    tried = [
        label_of(each.source)
        for each in results
        if isinstance(each.result, paramiko.AuthenticationException)
    ]
    if results and not tried:
        source, problem = results[0]
        # The server closes the connection if the agent refuses to sign.
        if isinstance(source, InMemoryPrivateKey):
            return NeedsSsh(f"it hung up on the key {label_of(source)} ({problem})")
        return Dropped(str(problem) or "end of file")
    return denied_error(destination, tried, len(results), keys.unusable)


def denied_error(
    destination: Destination,
    tried: Sequence[str],
    count: int,
    unusable: Sequence[tuple[str, str]],
) -> NodeError:
    """Return the error for a login that no key was accepted for, with a fix.

    `count` is the number of keys to offer; the server may hang up before all were `tried`.
    """
    fix = f"ssh-copy-id -p {destination.port} {destination.user}@{destination.host}"
    notes = [f"{why}: {remedy}" if remedy else why for why, remedy in unusable]
    if not tried and not notes:
        return NoKeyAtAll(
            "there is no key to log in with", f"once: ssh-keygen -t ed25519; then: {fix}"
        )
    if not tried:
        why, remedy = unusable[0]
        what = f"no key of yours can be used: {why}"
        return NeedsSsh("; ".join([what, *notes[1:]]), remedy or fix)
    what = f"it denies {destination.user} every key ({', '.join(tried)})"
    if len(tried) < count:
        what = f"it hung up on {destination.user} after {len(tried)} of {count} keys"
        what += f" ({', '.join(tried)})"
        fix = "name the right one in your ssh_config (IdentityFile, IdentitiesOnly yes), or " + fix
    return NeedsSsh("; ".join([what, *notes]), fix)


class NoKeyAtAll(NeedsSsh, NoKey):
    """Raised if this machine has no key; ssh may still log in by Kerberos or without a key."""
