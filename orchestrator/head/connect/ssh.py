"""Reaches nodes by SSH: fabric's connections, or the ssh program where only that gets there."""

from __future__ import annotations

import logging
import os
import random
import shutil
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING

from orchestrator.common.errors import NodeError
from orchestrator.head.connect import known_hosts, openssh, way
from orchestrator.head.connect.ssh_config import (
    MOST_HOPS,
    Destination,
    Login,
    SshConfig,
    loop_error,
)
from orchestrator.head.connect.transport import Connection, Dropped, NeedsSsh, seconds_left
from orchestrator.head.connect.way import Here, Way

if TYPE_CHECKING:
    from orchestrator.head.connect.fabric_login import FabricConnection

log = logging.getLogger(__name__)

# Concurrent logins. Each takes milliseconds of CPU time, so more at once only delay all of them.
# The time limit of each begins when it gets the semaphore.
LOGINS = threading.BoundedSemaphore(64)


class SshTransport:
    """Opens connections as the user's own ssh would."""

    def __init__(self, config: SshConfig, *, timeout: float = 10.0, strict: bool = False) -> None:
        self.config = config
        self.timeout = timeout
        self.strict = strict
        # Jump hosts are connected once for all nodes behind them.
        self._gateways: dict[Destination, Future[FabricConnection]] = {}
        self._changing = threading.Lock()

    def way_to(self, destination: Destination, hops: int = 0) -> Way:
        """Return the Way to a machine; it is by ssh if a jump host before it needs ssh."""
        here = Here(
            has_ssh=shutil.which("ssh") is not None,
            master=destination.is_open,
            certificate=certificate_of(destination),
        )
        defaults = self.config.defaults() if destination.settings else {}
        lines = known_hosts.lines_about(destination)
        chosen = way.choose_way(destination.settings, defaults, lines, here)
        if chosen.by_ssh or not destination.jump:
            return chosen
        if hops == MOST_HOPS:
            raise loop_error(destination.jump)
        hop = self.config.last_hop(destination.jump)
        before = self.way_to(hop, hops + 1)
        return Way("ssh", f"its jump host {hop.host}: {before.why}") if before.by_ssh else chosen

    def host_of(self, node: Login) -> str:
        return self.config.of_node(node).host

    def connect(self, node: Login, timeout: float | None = None) -> Connection:
        return self.connect_to(self.config.of_node(node), timeout or self.timeout)

    def connect_to(self, destination: Destination, seconds: float) -> Connection:
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
        return openssh.ssh_connection(
            destination, self.config.file, timeout, chosen, strict=self.strict, error=error
        )

    def _by_fabric(
        self,
        destination: Destination,
        seconds: float,
        chosen: Way,
        behind: tuple[Destination, ...] = (),
    ) -> FabricConnection:
        """Connect by fabric with retries; `behind` are the machines for which this is a jump host.

        sshd drops connections at random while many others log in (MaxStartups).
        """
        # The import takes 0.2 s, and seconds on a busy machine: no part of the time limit.
        from orchestrator.head.connect import fabric_login  # noqa: F401

        deadline = time.monotonic() + seconds
        dropped: Dropped | None = None
        while True:
            pause = random.uniform(0.1, 0.5)
            try:
                return self._log_in(destination, deadline, chosen, behind)
            except Dropped as error:
                dropped = error
            except NodeError:
                if dropped is None or time.monotonic() < deadline - pause:
                    # Otherwise it is the last of many retries, which had no time left.
                    raise
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
        from orchestrator.head.connect import fabric_login

        through = self._gateway(destination, deadline, behind) if destination.jump else None
        asked = time.monotonic()
        with LOGINS:
            deadline += time.monotonic() - asked
            return fabric_login.log_in(destination, deadline, chosen, through)

    def _gateway(
        self, destination: Destination, deadline: float, behind: tuple[Destination, ...]
    ) -> FabricConnection:
        """Return the connection to a jump host, opened by the first thread that needs it."""
        hop = self.config.last_hop(destination.jump)
        if hop in (destination, *behind):
            raise loop_error(destination.jump)
        with self._changing:
            future = self._gateways.get(hop)
            ours = future is None or (
                future.done() and (future.exception() is not None or not future.result().alive)
            )
            if future is None or ours:
                future = self._gateways[hop] = Future()
        try:
            if ours:
                try:
                    chosen = Way("fabric", "a jump host")
                    way_on = (destination, *behind)
                    future.set_result(self._by_fabric(hop, seconds_left(deadline), chosen, way_on))
                # result() raises it in each thread.
                except BaseException as error:  # noqa: BLE001
                    future.set_exception(error)
            return future.result(seconds_left(deadline))
        except FutureTimeout:
            raise NodeError(f"its jump host {hop.host} does not answer") from None
        except NodeError as error:
            kind = NeedsSsh if isinstance(error, NeedsSsh) else NodeError
            raise kind(f"its jump host {hop.host}: {error.what}", error.fix) from error


def certificate_of(destination: Destination) -> str:
    """Return the path of a certificate beside one of the user's keys, or ""."""
    names = (f"{str(path).removesuffix('.pub')}-cert.pub" for path in destination.keys)
    return next(filter(os.path.isfile, names), "")
