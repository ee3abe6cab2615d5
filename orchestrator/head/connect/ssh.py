"""One live SSH connection per node. Every failure is reported with its own cause, and in time."""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import io
import logging
import os
import random
import re
import select
import selectors
import shlex
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.utils import CryptographyDeprecationWarning

from orchestrator.common import interrupt
from orchestrator.common.errors import NodeError, NoKey, OrchestratorError
from orchestrator.head.connect import host_keys, tasks
from orchestrator.head.connect.host_keys import paramiko
from orchestrator.head.connect.ssh_config import Destination, OnlySsh, SshConfig, loop

KEEPALIVE_SECONDS = 15
PROHIBITED = 1  # administratively, in the answer to a channel that is not opened
LISTING_SECONDS = 5.0  # that an agent takes to list its keys,
SIGNING_SECONDS = 300.0  # and to sign: then nobody waits any more
# Seconds that each address of a host has before the next one is called, too.
HEAD_START_SECONDS = 0.25
WAKES = 5.0  # each connection's task wakes up after so many seconds; paramiko's own is 0.1
NAME_SECONDS = 10.0  # that a name server has, where nobody set a limit
LINK_SECONDS = 60.0  # a link that takes no byte for so long is cut
WINDOW_BYTES = 1 << 21
TURN_SECONDS = 0.1  # of a wait: one that took twice as long shows that this machine was late
LATE_SECONDS = 2.0  # in which this machine did nothing for a connection: worth a word
LONGEST_SECONDS = 3600.0  # paramiko's own limits, which count the time in which we are late
NEARLY_SECONDS = 0.2  # so near to its end, what failed has run out of time
KINDS_OF_KEY: tuple[tuple[type, type[paramiko.PKey]], ...] = (
    (rsa.RSAPrivateKey, paramiko.RSAKey),
    (ec.EllipticCurvePrivateKey, paramiko.ECDSAKey),
    (ed25519.Ed25519PrivateKey, paramiko.Ed25519Key),
)
KERBEROS = "GSSAPIAuthentication"
CONTROL_PATH = "write `ControlPath ~/.ssh/cm-%C` at the top of ~/.ssh/config, then "
LONGEST = 300  # of what a machine says
FAST_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")

# paramiko logs a traceback for every connection that fails; our own errors say what happened.
logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)
# cryptography warns of each DSA key, an old one that ssh-keygen has left in many homes.
warnings.simplefilter("ignore", CryptographyDeprecationWarning)


class Transport(paramiko.Transport):
    """A transport that asks for these kinds of host key only, and whose sender never fails first.

    What a dead connection cannot take is dropped once paramiko's reader has seen that it is dead,
    and readers hear of the end. A sender that meets the error first would get an EOFError, which is
    no error of a socket: it ended the head, or left a command running on the other nodes.
    """

    host_key_kinds: tuple[str, ...]

    def start(self) -> None:
        """Read the connection in a task: its loop waits, and nothing else."""
        tasks.STREAMS.start(self.run)

    @property
    def preferred_keys(self) -> tuple[str, ...]:
        return self.host_key_kinds

    def _send_user_message(self, data: paramiko.Message) -> None:
        with contextlib.suppress(EOFError):
            super()._send_user_message(data)  # type: ignore[misc]


class SshChannel:
    """A channel of paramiko's whose failures are all errors of the system, as a socket's are."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self.channel = channel
        self.settimeout, self.close = channel.settimeout, channel.close
        self.recv, self.recv_stderr = channel.recv, channel.recv_stderr
        self.recv_stderr_ready = channel.recv_stderr_ready
        self.recv_exit_status = channel.recv_exit_status
        self.shutdown_write = channel.shutdown_write

    def sendall(self, s: bytes, /) -> None:
        try:
            self.channel.sendall(s)
        except paramiko.SSHException as error:  # new keys are overdue
            raise ConnectionError(str(error)) from error


class Connection:
    """An authenticated connection to one machine, and those it passes through."""

    def __init__(
        self, transport: paramiko.Transport, address: str, through: Connection | None
    ) -> None:
        self.transport = transport
        self.address = address  # the other end's as the head sees it, "" behind a jump host
        self.through = through

    def run(self, command: str, timeout: float) -> SshChannel:
        """Start a command; the caller reads and writes the channel."""
        try:
            with parsing_its_words():
                channel = self.transport.open_session(window_size=WINDOW_BYTES, timeout=timeout)
                channel.settimeout(timeout)
                channel.exec_command(command)
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise NodeError(
                f"it lets us in, but no command can be started there ({error})",
                "check MaxSessions in its sshd_config and the login shell of this user",
            ) from error
        return SshChannel(channel)

    @property
    def alive(self) -> bool:
        return self.transport.is_active()

    def close(self) -> None:
        """Close it without waiting for its reader, which may sleep for seconds."""
        sock = self.transport.sock
        if isinstance(sock, socket.socket):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.transport.close()


class SshTransport:
    """Opens connections the way the user's ssh would."""

    def __init__(self, config: SshConfig, *, timeout: float = 10.0, strict: bool = False) -> None:
        self.config = config
        self.timeout = timeout
        self.strict = strict
        self._jumps: JumpHosts[Connection] = JumpHosts(config, self._connect)

    def connect(self, destination: Destination, timeout: float | None = None) -> Connection:
        return self._connect(destination, time.monotonic() + (timeout or self.timeout))

    def _connect(
        self, destination: Destination, deadline: float, behind: tuple[Destination, ...] = ()
    ) -> Connection:
        """Connect, with some more tries; `behind` are the machines to which this is the way."""
        dropped: ConnectionDropped | None = None
        while True:
            try:
                return self._connect_once(destination, deadline, behind)
            except ConnectionDropped as error:
                # sshd drops connections at random while many others are logging in (MaxStartups).
                dropped, pause = error, random.uniform(0.1, 0.5)
                if time.monotonic() + pause < deadline:
                    tasks.sleep(pause)
                    continue
            except NodeError:
                if dropped is None or time.monotonic() < deadline - NEARLY_SECONDS:
                    raise  # else it is the last of many tries, which had no time left
            raise NodeError(
                f"it closes every connection before the login ({dropped})",
                "check MaxStartups in its sshd_config, hosts.deny and fail2ban there",
            ) from dropped

    def _connect_once(
        self, destination: Destination, deadline: float, behind: tuple[Destination, ...]
    ) -> Connection:
        if destination.only_ssh:
            named = ", ".join(destination.only_ssh)
            raise OnlySsh(f"only ssh itself can do {named}, which your ssh_config asks for")
        guess = host_keys.is_guessed(destination)
        unwilling: list[Unwilling] = []
        while True:
            try:
                return self._attempt(destination, deadline, behind, unwilling, guess=guess)
            except host_keys.Guessed:
                guess = False
            except Unwilling as error:  # paramiko has closed the connection
                unwilling.append(error)

    def _attempt(
        self,
        destination: Destination,
        deadline: float,
        behind: tuple[Destination, ...],
        unwilling: Sequence[Unwilling],
        *,
        guess: bool,
    ) -> Connection:
        through = self._jumps.reach(destination, deadline, behind) if destination.jump else None
        sock = self._socket(destination, through, deadline)
        address = ""
        if isinstance(sock, socket.socket):
            address = str(sock.getpeername()[0])
        transport = Transport(sock)  # type: ignore[arg-type]  # a ProxyCommand is socket enough
        try:
            negotiate(transport, destination, guess=guess)
            deadline = shake_hands(transport, destination, deadline)
            host_keys.check(
                destination,
                transport.get_remote_server_key(),
                strict=self.strict,
                address=address,
                guess=guess,
            )
            log_in(transport, destination, deadline, unwilling)
        except BaseException as error:
            transport.close()
            if isinstance(error, ConnectionDropped) and isinstance(sock, ProxyCommand):
                sock.refuse_failed()
            raise
        transport.set_keepalive(KEEPALIVE_SECONDS)
        sock.settimeout(WAKES)
        return Connection(transport, address, through)

    def _socket(
        self, destination: Destination, through: Connection | None, deadline: float
    ) -> socket.socket | paramiko.Channel | ProxyCommand:
        where = (destination.host, destination.port)
        if through is not None:
            try:
                with parsing_its_words():
                    return through.transport.open_channel(
                        "direct-tcpip", where, ("127.0.0.1", 0), timeout=left(deadline)
                    )
            except (paramiko.SSHException, EOFError) as error:
                raise no_way_on(destination, error) from error
        if destination.proxy_command:
            return ProxyCommand(destination.proxy_command)
        return dial(where, destination, deadline)


def no_way_on(destination: Destination, error: Exception) -> NodeError:
    """Say why a jump host leads no further, and what to change there."""
    jump, where = destination.jump.rpartition(",")[2], f"{destination.host}:{destination.port}"
    if isinstance(error, paramiko.ChannelException):
        if error.code == PROHIBITED:
            return NodeError(
                f"the jump host {jump} may not connect us to {where}",
                "allow it in its sshd_config: AllowTcpForwarding yes, and no PermitOpen that"
                " excludes it",
            )
        error = Exception(error.text)
    return NodeError(
        f"the jump host {jump} cannot reach {where} ({error})",
        f"try it on the jump host: ssh -p {destination.port} {destination.host}",
    )


class ConnectionDropped(Exception):
    """The other side hung up before the login, which is worth another try."""


@contextlib.contextmanager
def parsing_its_words() -> Iterator[None]:
    """Turn whatever paramiko stumbles over into an error of the node, which has sent it."""
    try:
        yield
    except (paramiko.SSHException, EOFError, OSError):
        raise
    except Exception as error:
        raise NodeError(
            f"it does not keep to the SSH protocol ({type(error).__name__}: {error})",
            "is it really an sshd that answers there?",
        ) from error


class Agent(paramiko.agent.AgentSSH):
    """The agent behind a socket, whichever: paramiko's own knows that of SSH_AUTH_SOCK alone."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.signing = False  # it may be waiting for its user to touch or to confirm
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(LISTING_SECONDS)
        try:
            sock.connect(path)
            sock = tasks.Socket.of(sock)
            self._connect(sock)  # type: ignore[attr-defined]
        except BaseException:
            sock.close()
            raise
        sock.settimeout(SIGNING_SECONDS)

    def _send_message(self, msg: object) -> tuple[int, paramiko.Message]:
        self.signing = True
        answer: tuple[int, paramiko.Message] = super()._send_message(msg)  # type: ignore[misc]
        self.signing = False
        return answer


def left(deadline: float) -> float:
    return max(0.05, deadline - time.monotonic())


def dial(where: tuple[str, int], destination: Destination, deadline: float) -> tasks.Socket:
    """Open a TCP connection, or raise a NodeError that says why not."""
    host, port = where
    source = (destination.bind_address, 0) if destination.bind_address else None
    try:
        addresses = resolved(host, port, destination.family, deadline)
        sock = first_to_answer(addresses, source, deadline)
    except ConnectionRefusedError as error:
        raise NodeError(
            f"it refuses connections on port {port}",
            "is sshd running there, and on this port? write host:port in the list for another port",
        ) from error
    except TimeoutError as error:
        raise NodeError(
            f"it does not answer on port {port}",
            "is it up? does a firewall drop the packets?",
        ) from error
    except OSError as error:
        if error.errno == 111:
            raise ConnectionDropped(str(error)) from error
        raise NodeError(f"there is no route to it: {error.strerror or error}") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # paramiko goes on trying to send for as long as the kernel does, which is a quarter of an hour.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(LINK_SECONDS * 1000))
    return tasks.Socket.of(sock)


IS_ADDRESS = re.compile(r"[0-9.]+|[0-9a-fA-F:.]*:.*")
FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}


def resolved(host: str, port: int, family: str, deadline: float) -> list[tuple[int, Any]]:
    """Return the addresses of a host, each with its family, as connect() takes them.

    A name server that does not answer holds up nobody else, as hundreds may be asked at once.
    """
    kind = FAMILIES.get(family, socket.AF_UNSPEC)
    ask = functools.partial(socket.getaddrinfo, host, port, kind, socket.SOCK_STREAM)
    try:
        found = ask() if IS_ADDRESS.fullmatch(host) else tasks.aside(ask, left(deadline))
    except TimeoutError as error:
        raise NodeError(
            "its name cannot be resolved: no name server answers",
            f"look at /etc/resolv.conf, or list an address instead of {host!r}",
        ) from error
    except socket.gaierror as error:
        raise NodeError(
            "its name cannot be resolved",
            f"check the spelling of {host!r}, /etc/hosts, ssh_config",
        ) from error
    return [(kind, address) for kind, _, _, _, address in found]


def addresses_of(destination: Destination) -> set[str]:
    """Return the IP addresses to which a machine's name leads now."""
    deadline = time.monotonic() + NAME_SECONDS
    found = resolved(destination.host, destination.port, destination.family, deadline)
    return {str(address[0]) for _, address in found}


def first_to_answer(
    addresses: Sequence[tuple[int, Any]], source: tuple[str, int] | None, deadline: float
) -> socket.socket:
    """Call the addresses of a host, each a moment after the one before; keep the first to answer.

    One after the other, an IPv6 address that drops all packets would use up the time of all.
    """
    waiting, calls = list(addresses), selectors.EpollSelector()
    error: OSError = TimeoutError("timed out")
    try:
        while waiting or calls.get_map():
            if waiting:
                try:
                    calls.register(begin_to_call(*waiting.pop(0), source), selectors.EVENT_WRITE)
                except OSError as failed:
                    error = failed
                    continue  # with the next address, without waiting
            limit = left(deadline)
            limit = min(HEAD_START_SECONDS, limit) if waiting else limit
            tasks.ready(calls.fileno(), select.EPOLLIN, limit)
            for key, _ in calls.select(0):
                sock: socket.socket = key.fileobj  # type: ignore[assignment]
                calls.unregister(sock)
                number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not number:
                    sock.settimeout(left(deadline))
                    return sock
                sock.close()
                error = OSError(number, os.strerror(number))
            if time.monotonic() >= deadline:
                raise TimeoutError("timed out")
        raise error
    finally:
        for key in list(calls.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        calls.close()


def begin_to_call(kind: int, address: Any, source: tuple[str, int] | None) -> socket.socket:
    """Open a socket and begin to connect it, without waiting."""
    sock = socket.socket(kind, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if source:
            sock.bind(source)
        number = sock.connect_ex(address)
        if number not in (0, errno.EINPROGRESS):
            raise OSError(number, os.strerror(number))
    except BaseException:
        sock.close()
        raise
    return sock


# -- handshake --------------------------------------------------------------------------------


def awaited(event: tasks.Event, transport: Transport, deadline: float) -> float:
    """Wait for what a transport's task does; return the deadline, which may have moved.

    Time in which this machine had no processor for us does not count: with hundreds of nodes and
    programs that compute, healthy ones would seem to hang.
    """
    while not event.is_set() and transport.is_active() and time.monotonic() < deadline:
        began = time.monotonic()
        event.wait(TURN_SECONDS)
        late = time.monotonic() - began - TURN_SECONDS
        deadline += late if late > TURN_SECONDS else 0.0
    return deadline


def shake_hands(transport: Transport, destination: Destination, deadline: float) -> float:
    """Agree on keys with the other side, which shows that it owns its host key.

    Return the deadline of the login.
    """
    transport.banner_timeout = transport.handshake_timeout = LONGEST_SECONDS
    event, begun = tasks.Event(), deadline
    try:
        with parsing_its_words():
            transport.start_client(event)  # type: ignore[arg-type]
            deadline = awaited(event, transport, deadline)
            if not transport.is_active():
                raise transport.get_exception() or paramiko.SSHException("end of file")
    except paramiko.ssh_exception.IncompatiblePeer as error:
        raise OnlySsh(
            f"its sshd and our client have no common algorithm: {error}",
            "look at HostKeyAlgorithms, KexAlgorithms, Ciphers and MACs in both configurations",
        ) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        if time.monotonic() < deadline - NEARLY_SECONDS:
            raise ConnectionDropped(str(error) or "end of file") from error
    if transport.initial_kex_done:
        return deadline
    if isinstance(transport.sock, ProxyCommand):
        said = transport.sock.last_words
        raise NodeError(
            "its ProxyCommand leads to no SSH server, and "
            + (f"says: {said}" if said else "stays silent"),
            f"try it: {destination.proxy_command}",
        )
    raise NodeError(
        "it accepts the connection, then hangs in the SSH handshake",
        f"is port {destination.port} really its sshd? try: ssh -v -p {destination.port} "
        f"{destination.user}@{destination.host}{was_late(deadline - begun)}",
    )


def was_late(seconds: float) -> str:
    """Say how long this machine itself had no time for a connection, if that is much."""
    if seconds < LATE_SECONDS:
        return ""
    return f"; this machine itself was so busy that it did nothing for {seconds:.0f} s meanwhile"


def negotiate(transport: Transport, destination: Destination, *, guess: bool) -> None:
    """Offer what ssh_config allows and paramiko can do, the fastest ciphers first."""
    options, allowed = transport.get_security_options(), destination.algorithms
    transport.host_key_kinds = host_keys.preferred_algorithms(
        destination, super(Transport, transport).preferred_keys, guess=guess
    )
    ciphers = sorted(options.ciphers, key=lambda name: name not in FAST_CIPHERS)
    options.ciphers = common("Ciphers", ciphers, allowed.ciphers)
    options.digests = common("MACs", options.digests, allowed.macs)
    options.kex = common("KexAlgorithms", options.kex, allowed.kex)
    common("HostKeyAlgorithms", transport.host_key_kinds, allowed.host_keys)


def common(keyword: str, ours: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    """Return what paramiko can do of what ssh_config allows."""
    both = tuple(name for name in ours if name in allowed or not allowed)
    if not both:
        raise OnlySsh(
            f"{keyword} of your ssh_config allows nothing that this program can do: "
            f"{', '.join(allowed)}",
            f"allow one of {', '.join(ours)}" if ours else "",
        )
    return both


# -- login ------------------------------------------------------------------------------------


def log_in(
    transport: Transport,
    destination: Destination,
    deadline: float,
    unwilling: Sequence[Unwilling] = (),
) -> None:
    """Log in with public keys, or with nothing: nobody can type a password for 64 nodes at once."""
    tried: list[str] = []
    notes = [Unusable(error.what, error.fix) for error in unwilling]
    skipped = [error.label for error in unwilling]
    keys = [pair for pair in keys_for(destination, notes) if pair[0] not in skipped]
    accepted: list[str] = []  # where that is no key
    for label, key in [*keys, ("", None)]:  # Tailscale's own sshd asks for nothing
        if not transport.is_active():
            break
        if key is not None and accepted:
            continue
        try:
            more, deadline = ask_in(transport, destination.user, key, deadline)
        except paramiko.BadAuthenticationType as error:
            accepted = [] if "publickey" in error.allowed_types else error.allowed_types
            continue
        except paramiko.AuthenticationException:
            tried += [label] if key is not None else []
            continue
        except (paramiko.SSHException, EOFError, OSError) as error:
            if "cannot be used for signing" in str(error):
                raise Unwilling(label) from error
            if key is None:
                break  # one try too many, for sshd
            raise ConnectionDropped(str(error) or "end of file") from error
        if more is None:
            raise slow_login(label, key, banner(transport))
        if more:
            raise NodeError(
                f"after the key it also wants {', '.join(more)}, which cannot be asked here",
                f"{open_by_hand(destination)}; or have {destination.user} let in by a key alone, in"
                " its sshd_config: Match Address HEAD, then AuthenticationMethods publickey",
            )
        return
    refused = denied(destination, tried, len(keys), notes)
    if accepted:
        what = f"it accepts no public keys for {destination.user}, only {', '.join(accepted)}"
        fix = f"allow PubkeyAuthentication in its sshd_config, or {open_by_hand(destination)}"
        refused = NodeError(what, fix)
    if has_other_login(destination):
        refused = OnlySsh(refused.what, refused.fix)
    raise refused


def has_other_login(destination: Destination) -> bool:
    """Tell whether ssh itself may get in by something else than the keys that we know."""
    return any(way != KERBEROS or has_ticket() for way in destination.other_logins)


def open_by_hand(destination: Destination) -> str:
    """Say how the user's own ssh opens a connection, by which ours then goes."""
    where = "" if destination.control_path else CONTROL_PATH
    there = f"-p {destination.port} {destination.user}@{destination.name or destination.host}"
    return f"{where}log in by hand once, and all commands go by that: ssh -fNM {there}"


def ask_in(
    transport: Transport, user: str, key: paramiko.PKey | None, deadline: float
) -> tuple[list[str] | None, float]:
    """Ask to be let in; return what it wants besides, None if it does not answer, and when."""
    event = tasks.Event()
    with parsing_its_words():
        if key is None:
            handler = transport.auth_handler = paramiko.auth_handler.AuthHandler(transport)
            handler.auth_none(user, event)  # type: ignore[arg-type]
        else:
            transport.auth_publickey(user, key, event)  # type: ignore[arg-type]
        deadline = awaited(event, transport, deadline)
        if not event.is_set() and transport.is_active():
            return None, deadline
        assert transport.auth_handler is not None
        return transport.auth_handler.wait_for_response(event), deadline  # type: ignore[arg-type]


def denied(
    destination: Destination, tried: Sequence[str], count: int, notes: Sequence[Unusable]
) -> NodeError:
    """Say why none of so many keys opened it, and what does."""
    what = f"it denies {destination.user} every key" + (f" ({', '.join(tried)})" if tried else "")
    fix = f"ssh-copy-id -p {destination.port} {destination.user}@{destination.host}"
    if len(tried) < count:
        what = (
            f"it hung up on {destination.user} after {len(tried)} of {count} keys"
            f" ({', '.join(tried)})"
        )
        fix = "name the right one in your ssh_config (IdentityFile, IdentitiesOnly yes), or " + fix
    if tried:
        return NodeError("; ".join([what, *map(str, notes)]), fix)
    if not notes:
        what = "there is no key to log in with"
        return NoKey(what, f"once: ssh-keygen -t ed25519; then: {fix}")
    # The node may know them: none was shown to it.
    first, *others = notes
    return NodeError("; ".join([f"no key of yours can be used: {first.why}", *map(str, others)]),
                     first.remedy or fix)  # fmt: skip


@functools.cache
def has_ticket() -> bool:
    """Tell whether this login has a valid Kerberos ticket."""
    try:
        command = subprocess.run(["klist", "-s"], stdin=subprocess.DEVNULL, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return command.returncode == 0


def banner(transport: Transport) -> str:
    """Return what it has said before the login, in one line."""
    said = (transport.get_banner() or b"").decode(errors="replace")
    return " ".join(said.split())[-LONGEST:]


def slow_login(label: str, key: paramiko.PKey | None, said: str) -> NodeError:
    """Say who did not answer in time: an agent may wait for its user, or the other side for him."""
    if isinstance(key, paramiko.AgentKey) and getattr(key.agent, "signing", False):
        return NodeError(
            f"the key {label} does not sign: it waits to be touched, unlocked or confirmed",
            "do so while it connects, with a longer --connect-timeout; or use a key that asks"
            " nobody, as each node asks once",
        )
    if said:
        return NodeError(
            f"it hangs during the login, and says: {said}",
            "do what it says while it connects, with a longer --connect-timeout",
        )
    return NodeError(
        "it hangs during the login",
        "a slow directory or PAM there? --connect-timeout 60 waits longer; try: ssh to it",
    )


class Unwilling(NodeError):
    """A key with which its agent does not sign."""

    def __init__(self, label: str) -> None:
        super().__init__(
            f"the agent refuses to sign with the key {label}", "confirm or touch it when it asks"
        )
        self.label = label


class Unusable(NamedTuple):
    """A file that should hold a private key."""

    why: str
    remedy: str = ""
    path: Path | None = None  # of a key that an agent may hold

    def __str__(self) -> str:
        return f"{self.why}: {self.remedy}" if self.remedy else self.why


def keys_for(destination: Destination, notes: list[Unusable]) -> list[tuple[str, paramiko.PKey]]:
    """Return named keys; like ssh, those in the config come before the agent's others."""
    files: list[tuple[str, paramiko.PKey]] = []
    for path in destination.keys:
        key = load_key(path, destination.certificates)
        if isinstance(key, Unusable):
            notes.append(key)
        elif key is not None:
            files.append((f"{path}{validity(key)}", key))
    wanted = {public_blob(path) for path in destination.keys}
    # Servers hang up after a few keys, so that those of the config come first here, too. A security
    # key comes last: it asks to be touched before a server has said whether it knows the key.
    agent = sorted(
        agent_keys(destination, notes),
        key=lambda key: (key[1].asbytes() not in wanted, key[1].get_name().startswith("sk-")),
    )
    if destination.only_these_keys:
        agent = [(label, key) for label, key in agent if key.asbytes() in wanted]
    held = {key.asbytes() for _, key in agent}
    notes[:] = [note for note in notes if note.path is None or public_blob(note.path) not in held]
    listed = {key.asbytes() for _, key in files}
    agent = [(label, key) for label, key in agent if key.asbytes() not in listed]
    return files + [pair for one in agent for pair in certified(one, destination)]


def certified(
    one: tuple[str, paramiko.PKey], destination: Destination
) -> Iterator[tuple[str, paramiko.PKey]]:
    """Yield a key of the agent with each certificate that a file has for it, and then alone."""
    label, key = one
    names = (path.name.removesuffix(".pub") + "-cert.pub" for path in destination.keys)
    usual = (path.with_name(name) for path, name in zip(destination.keys, names, strict=True))
    for path in dict.fromkeys((*destination.certificates, *usual)):
        if isinstance(key, paramiko.AgentKey) and key.asbytes() == certified_key(path):
            with_it = paramiko.AgentKey(key.agent, key.blob, key.comment)
            with contextlib.suppress(paramiko.SSHException, ValueError):
                with_it.load_certificate(str(path))
                yield f"{label} with {path}", with_it
    yield one


def validity(key: paramiko.PKey) -> str:
    """Say so if a key has a certificate that does not count now."""
    blob: Any = key.public_blob
    if blob is None:
        return ""
    line = f"{blob.key_type} {base64.b64encode(blob.key_blob).decode()}".encode()
    try:
        certificate = serialization.load_ssh_public_identity(line)
        assert isinstance(certificate, serialization.SSHCertificate)
        now = certificate.valid_after <= time.time() < certificate.valid_before
    except Exception:  # noqa: BLE001  whatever the file has
        return ""
    return "" if now else ", whose certificate is not valid now"


def certified_key(path: Path) -> bytes:
    """Return the public key that a file certifies, nothing for a file that does not."""
    try:
        certificate = serialization.load_ssh_public_identity(path.read_bytes())
        assert isinstance(certificate, serialization.SSHCertificate)
        as_ssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        return base64.b64decode(certificate.public_key().public_bytes(*as_ssh).split()[1])
    except Exception:  # noqa: BLE001  whatever the file has
        return b""


def agent_keys(destination: Destination, notes: list[Unusable]) -> list[tuple[str, paramiko.PKey]]:
    path = destination.agent or os.environ.get("SSH_AUTH_SOCK", "")
    if path in ("", "none"):
        return []
    try:
        keys = Agent(path).get_keys()
    except (paramiko.SSHException, OSError) as error:
        if destination.agent:
            reason = getattr(error, "strerror", None) or str(error)
            notes.append(
                Unusable(f"the agent {path}, of your ssh_config, does not answer ({reason})")
            )
        return []
    return [(" ".join(["agent:", key.comment or key.get_name()]), key) for key in keys]


def public_blob(path: Path) -> bytes:
    """Return the public half of an IdentityFile, which may be all of it that is here."""
    try:
        path = path if path.suffix == ".pub" else path.with_name(path.name + ".pub")
        fields = path.read_text().split()
        return base64.b64decode(fields[1])
    except (OSError, IndexError, ValueError):
        return b""


@functools.cache
def load_key(path: Path, certificates: tuple[Path, ...]) -> paramiko.PKey | Unusable | None:
    """Return the key in a file, why it cannot be used, or None if there is no such file."""
    try:
        if path.suffix == ".pub" or not path.is_file():  # the agent has the other half
            return None
        status = path.stat()
    except PermissionError:  # of its directory
        return Unusable(f"{path} cannot be read")
    if status.st_uid == os.getuid() and status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        reason = f"{path} is open to others, mode {mode:04o}, and therefore not used"
        return Unusable(reason, f"chmod 600 {shlex.quote(str(path))}")
    try:
        key = read_key(path)
    except paramiko.PasswordRequiredException:
        return for_the_agent(path, "needs a passphrase")
    except PermissionError:
        return Unusable(f"{path} cannot be read")
    except Exception as error:  # noqa: BLE001  each format has errors of its own
        if "assphrase" in str(error) or "encrypted" in str(error) or "assword" in str(error):
            return for_the_agent(path, "needs a passphrase")
        if re.search("sk-(ssh|ecdsa)", str(error)):
            return for_the_agent(path, "is a security key, which an agent has to ask")
        return Unusable(f"{path} is not a key we can read ({error})")
    usual = path.with_name(path.name + "-cert.pub")
    for certificate in (*certificates, usual):
        if certificate.is_file():
            try:
                key.load_certificate(str(certificate))
                break
            except (paramiko.SSHException, ValueError):
                continue
    return key


def read_key(path: Path) -> paramiko.PKey:
    """Read a key in any format that ssh reads; paramiko by itself does not know PKCS#8."""
    data = path.read_bytes()
    try:
        key: Any = serialization.load_ssh_private_key(data, None)
    except ValueError:
        key = serialization.load_pem_private_key(data, None)
    openssh = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
    text = key.private_bytes(*openssh, serialization.NoEncryption()).decode()
    for kind, ours in KINDS_OF_KEY:
        if isinstance(key, kind):
            return ours.from_private_key(io.StringIO(text))
    raise paramiko.SSHException("of a kind that sshd takes no longer")


def for_the_agent(path: Path, why: str) -> Unusable:
    """Say what makes a key usable: ssh-add, which needs an agent."""
    agent = "" if os.environ.get("SSH_AUTH_SOCK") else 'eval "$(ssh-agent -s)"; '
    return Unusable(f"{path} {why}", f"{agent}ssh-add {shlex.quote(str(path))}", path)


# -- jump hosts ---------------------------------------------------------------------------------
# The machines of ProxyJump: each is connected once, for all nodes that are reached through it.


class Open(Protocol):
    @property
    def alive(self) -> bool: ...


C = TypeVar("C", bound=Open)
Connect = Callable[[Destination, float, tuple[Destination, ...]], C]


class JumpHosts(Generic[C]):
    """Connections to jump hosts, and attempts that are still under way."""

    def __init__(self, config: SshConfig, connect: Connect[C]) -> None:
        self.config = config
        self.connect = connect  # (destination, deadline, the machines behind it)
        self.attempts: dict[Destination, Attempt[C]] = {}
        self.changing = threading.Lock()  # held for a look at the table, never while connecting

    def reach(
        self, destination: Destination, deadline: float, behind: tuple[Destination, ...]
    ) -> C:
        """Connect to the last machine of a ProxyJump list, or wait for whoever does so already."""
        hop = self.config.last_hop(destination.jump)
        if hop in (destination, *behind):
            raise loop(destination.jump)
        with self.changing:
            attempt = self.attempts.get(hop)
            ours = attempt is None or attempt.has_ended
            if ours:
                attempt = self.attempts[hop] = Attempt()
        assert attempt is not None
        if ours:
            try:
                attempt.result = self.connect(hop, deadline, (destination, *behind))
            except BaseException as error:  # noqa: BLE001  for whoever waits; ours is raised below
                attempt.result = error
            attempt.over.set()
        attempt.over.wait(left(deadline))
        result = attempt.result
        if result is None:
            raise NodeError(f"its jump host {hop.host} does not answer")
        if isinstance(result, OrchestratorError):
            kind = OnlySsh if isinstance(result, OnlySsh) else NodeError
            raise kind(f"its jump host {hop.host}: {result.what}", result.fix) from result
        if isinstance(result, BaseException):
            raise result
        return result


class Attempt(Generic[C]):
    """A connection on its way, and what became of it."""

    def __init__(self) -> None:
        self.over = tasks.Event()
        self.result: C | BaseException | None = None

    @property
    def has_ended(self) -> bool:
        """Tell whether it failed, or its connection has ended since."""
        result = self.result
        if result is None:
            return False
        return isinstance(result, BaseException) or not result.alive


# -- proxy command ------------------------------------------------------------------------------
# The user's ProxyCommand: a program whose standard streams lead to a machine.


class ProxyCommand:
    """A running ProxyCommand, with the part of a socket's interface that paramiko uses."""

    def __init__(self, command: str) -> None:
        self.command = command
        pair = socket.socketpair()
        ours, theirs = tasks.Socket.of(pair[0]), pair[1]
        shell = os.environ.get("SHELL") or "/bin/sh"  # as ssh chooses it
        # Like any program behind a connection it may complain at any time: not to our terminal.
        self.complaints = tempfile.TemporaryFile()  # noqa: SIM115  closed with the connection
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [shell, "-c", f"exec {command}"],  # the user's own config
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=self.complaints,
                    start_new_session=True,
                )
            except OSError as error:
                raise NodeError(f"{shell} cannot run its ProxyCommand: {error.strerror}") from error
        self.sock = ours
        self.settimeout, self.recv = ours.settimeout, ours.recv
        self.stuck_since = 0.0
        interrupt.before_exit(self.hang_up)

    @property
    def _closed(self) -> bool:  # paramiko looks at this of a socket
        return self.sock.fileno() == -1

    def send(self, data: bytes) -> int:
        """Send what it takes; one that took nothing for as long as a cut link may is of no use."""
        try:
            count = self.sock.send(data)
        except TimeoutError:
            now = time.monotonic()
            self.stuck_since = self.stuck_since or now
            if now - self.stuck_since > LINK_SECONDS:
                raise ConnectionError("it takes no more bytes") from None
            raise
        self.stuck_since = 0.0
        return count

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # a reader wakes up
        self.sock.close()
        self.hang_up()

    def refuse_failed(self) -> None:
        """Raise if the command failed by itself, after its streams were closed."""
        code = self.process.wait()
        if code in (0, -signal.SIGHUP):
            return  # what it leads to hung up
        said = self.last_words
        raise NodeError(
            f"its ProxyCommand ends with exit code {code}{said and ': ' + said}",
            f"try it: {self.command}",
        )

    @property
    def last_words(self) -> str:
        """Return what it has said last on standard error."""
        size = os.fstat(self.complaints.fileno()).st_size
        data = os.pread(self.complaints.fileno(), LONGEST, max(0, size - LONGEST))
        return " ".join(data.decode(errors="replace").split())

    def hang_up(self) -> None:
        """Send SIGHUP, as ssh does: a command that waits for something else would stay behind."""
        with contextlib.suppress(ProcessLookupError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGHUP)
