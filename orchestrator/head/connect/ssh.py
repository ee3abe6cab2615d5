"""Reaches nodes by SSH: fabric's connections, or the ssh program where only that gets there."""

from __future__ import annotations

import functools
import logging
import os
import random
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.common.errors import NodeError, UsageError
from orchestrator.head.connect import known_hosts, openssh, way
from orchestrator.head.connect.ssh_config import (
    MOST_HOPS,
    Destination,
    Settings,
    SshConfig,
    loop,
)
from orchestrator.head.connect.transport import (
    NEARLY_SECONDS,
    Connection,
    Dropped,
    NeedsSsh,
    left,
    within,
)
from orchestrator.head.connect.way import Here, Way

if TYPE_CHECKING:
    import fabric
    import paramiko

    from orchestrator.head.connect.fabric_login import FabricConnection

log = logging.getLogger(__name__)

LINK_SECONDS = 60.0  # without progress after which a link is cut
NEXT_ADDRESS_SECONDS = 2.0  # for each address of a host but the last
# Logins at a time. Each takes milliseconds of a processor, so more at once only make all of them
# late; the time limit of each begins with its turn.
LOGINS = threading.BoundedSemaphore(32)


class SshTransport:
    """Opens connections the way the user's ssh would."""

    def __init__(self, config: SshConfig, *, timeout: float = 10.0, strict: bool = False) -> None:
        self.config = config
        self.timeout = timeout
        self.strict = strict
        # Jump hosts are connected once for all nodes behind them.
        self._gateways: dict[Destination, Future[FabricConnection]] = {}
        self._changing = threading.Lock()

    def way_to(self, destination: Destination, hops: int = 0) -> Way:
        """Return how a machine is reached, with the jump hosts before it."""
        settings = destination.settings
        here = Here(
            has_ssh=shutil.which("ssh") is not None,
            master=destination.is_open,
            certificate=next((str(path) for path in certificates(destination)), ""),
            algorithms=negotiable,
        )
        defaults = self.config.defaults() if settings else {}
        lines = known_hosts.lines_about(destination)
        alone = known_hosts.lines_without_port(destination)
        lines += [line for line in alone if line.needs_ssh]
        chosen = way.choose(settings, defaults, lines, here)
        if chosen.by_ssh or not destination.jump:
            return chosen
        if hops == MOST_HOPS:
            raise loop(destination.jump)
        hop = self.config.last_hop(destination.jump)
        before = self.way_to(hop, hops + 1)
        return Way("ssh", f"its jump host {hop.host}: {before.why}") if before.by_ssh else chosen

    def connect(self, destination: Destination, timeout: float | None = None) -> Connection:
        seconds = timeout or self.timeout
        chosen = self.way_to(destination)
        log.info("%s: by %s", destination.name, chosen)
        if chosen.by_ssh:
            return self._by_ssh(destination, seconds, chosen)
        try:
            return self._by_fabric(destination, seconds, chosen)
        except NeedsSsh as error:
            if shutil.which("ssh") is None:
                raise
            log.info("%s: fabric: %s; asking ssh", destination.name, error.what)
            return self._by_ssh(destination, seconds, Way("ssh", error.what), error)

    def _by_ssh(
        self,
        destination: Destination,
        timeout: float,
        chosen: Way,
        error: NodeError | None = None,
    ) -> Connection:
        file = self.config.file
        return openssh.reach(destination, file, timeout, chosen, strict=self.strict, error=error)

    def fabric_connection(self, destination: Destination) -> fabric.Connection:
        """Return a connection of fabric's that is not open yet, with the jump hosts before it."""
        chosen = self.way_to(destination)
        if chosen.by_ssh:
            raise UsageError(
                f"fabric cannot reach {destination.name}: {chosen.why}",
                "use Cluster.run or `orchestrator exec`, which go by the ssh program there",
            )
        from orchestrator.head.connect import fabric_login

        gateway: fabric.Connection | bool = False
        if destination.jump:
            gateway = self.fabric_connection(self.config.last_hop(destination.jump))
        return fabric_login.prepared(destination, gateway, strict=self.strict)

    def _by_fabric(
        self,
        destination: Destination,
        seconds: float,
        chosen: Way,
        behind: tuple[Destination, ...] = (),
    ) -> FabricConnection:
        """Connect, with more tries; `behind` are the machines to which this is the way.

        sshd drops connections at random while many others log in (MaxStartups).
        """
        deadline = time.monotonic() + seconds
        dropped: Dropped | None = None
        while True:
            try:
                return self._log_in(destination, deadline, chosen, behind)
            except Dropped as error:
                dropped = error
            except NeedsSsh:
                raise
            except NodeError:  # A last try may only have had too little time.
                if dropped is None or time.monotonic() < deadline - NEARLY_SECONDS:
                    raise
            pause = random.uniform(0.1, 0.5)
            if time.monotonic() + pause >= deadline:
                raise NodeError(
                    f"it closes every connection before the login ({dropped})",
                    "check MaxStartups in its sshd_config, hosts.deny and fail2ban there",
                ) from dropped
            log.debug("%s: dropped (%s), again in %.1f s", destination.name, dropped, pause)
            time.sleep(pause)

    def _log_in(
        self,
        destination: Destination,
        deadline: float,
        chosen: Way,
        behind: tuple[Destination, ...],
    ) -> FabricConnection:
        from orchestrator.head.connect import fabric_login  # It takes 0.2 s.

        through: FabricConnection | None = None
        sock: socket.socket | paramiko.Channel
        if destination.jump:
            through = self._gateway(destination, deadline, behind)
            sock = fabric_login.channel_to(through, destination, deadline)
        else:
            sock = dial(destination, deadline)
        asked = time.monotonic()
        try:
            with LOGINS:
                deadline += time.monotonic() - asked
                return fabric_login.log_in(
                    destination, sock, deadline, chosen, through, strict=self.strict
                )
        except BaseException:
            sock.close()
            raise

    def _gateway(
        self, destination: Destination, deadline: float, behind: tuple[Destination, ...]
    ) -> FabricConnection:
        """Return the connection to a jump host, made by the first node that needs it."""
        hop = self.config.last_hop(destination.jump)
        if hop in (destination, *behind):
            raise loop(destination.jump)
        with self._changing:
            future = self._gateways.get(hop)
            ours = future is None or has_ended(future)
            if future is None or ours:
                future = self._gateways[hop] = Future()
        try:
            if ours:
                try:
                    seconds = left(deadline)
                    chosen = Way("fabric", "a jump host")
                    way_on = (destination, *behind)
                    future.set_result(self._by_fabric(hop, seconds, chosen, way_on))
                except BaseException as error:  # noqa: BLE001  raised by result() in each thread
                    future.set_exception(error)
            return future.result(left(deadline))
        except FutureTimeout:
            raise NodeError(f"its jump host {hop.host} does not answer") from None
        except NodeError as error:
            kind = NeedsSsh if isinstance(error, NeedsSsh) else NodeError
            raise kind(f"its jump host {hop.host}: {error.what}", error.fix) from error


def has_ended(future: Future[FabricConnection]) -> bool:
    """Return True for an attempt that failed, or whose connection has ended since."""
    return future.done() and (future.exception() is not None or not future.result().alive)


def negotiable() -> Settings:
    from orchestrator.head.connect import fabric_login  # Few configurations ask for it.

    return fabric_login.algorithms()


def certificates(destination: Destination) -> Iterator[Path]:
    """Yield the certificates that lie beside the user's keys."""
    for path in destination.keys:
        beside = path.with_name(path.name.removesuffix(".pub") + "-cert.pub")
        if os.path.isfile(beside):  # noqa: PTH113  False where it may not be looked at
            yield beside


# -- the socket -------------------------------------------------------------------------------

FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}


def dial(destination: Destination, deadline: float) -> socket.socket:
    """Open a TCP connection to the first address that answers; say why where none does."""
    port = destination.port
    try:
        sock = first_to_answer(resolved(destination, deadline), destination.bind_address, deadline)
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
        raise NodeError(f"there is no route to it: {error.strerror or error}") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: else it tries for a quarter of an hour
        milliseconds = int(LINK_SECONDS * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return sock


Address = tuple[int, Any]


def resolved(destination: Destination, deadline: float) -> list[Address]:
    """Return the addresses of a host, each with its family."""
    host, family = destination.host, FAMILIES.get(destination.family, socket.AF_UNSPEC)
    ask = functools.partial(socket.getaddrinfo, host, destination.port, family, socket.SOCK_STREAM)
    try:
        found = within(left(deadline), ask)
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


def first_to_answer(addresses: Sequence[Address], source: str, deadline: float) -> socket.socket:
    """Connect to one address after the other; one that is silent leaves time for the next."""
    failure: OSError = TimeoutError("timed out")
    for number, (family, address) in enumerate(addresses, 1):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            last = number == len(addresses)
            sock.settimeout(left(deadline) if last else min(NEXT_ADDRESS_SECONDS, left(deadline)))
            if source:
                sock.bind((source, 0))
            sock.connect(address)
            return sock
        except OSError as error:
            sock.close()
            failure = error
    raise failure
