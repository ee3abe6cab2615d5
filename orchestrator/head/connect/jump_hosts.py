"""The machines of ProxyJump: each is connected once, for all nodes that are reached through it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.head.connect.ssh_config import Destination, SshConfig, loop

if TYPE_CHECKING:
    from concurrent.futures import Future


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
        self.attempts: dict[Destination, Future[C]] = {}
        self.changing = threading.Lock()  # held for a look at the table, never while connecting

    def reach(
        self, destination: Destination, deadline: float, behind: tuple[Destination, ...]
    ) -> C:
        """Connect to the last machine of a ProxyJump list, or wait for whoever does so already."""
        from concurrent.futures import Future, TimeoutError  # 4 ms of every command's start

        hop = self.config.last_hop(destination.jump)
        if hop in (destination, *behind):
            raise loop(destination.jump)
        with self.changing:
            attempt = self.attempts.get(hop)
            ours = attempt is None or _is_over(attempt)
            if ours:
                attempt = self.attempts[hop] = Future()
        assert attempt is not None
        if ours:
            try:
                attempt.set_result(self.connect(hop, deadline, (destination, *behind)))
            except BaseException as error:  # noqa: BLE001  for whoever waits; ours is raised below
                attempt.set_exception(error)
        try:
            return attempt.result(max(0.05, deadline - time.monotonic()))
        except TimeoutError:
            raise NodeError(f"its jump host {hop.host} does not answer") from None
        except OrchestratorError as error:
            raise NodeError(f"its jump host {hop.host}: {error.what}", error.fix) from error


def _is_over(attempt: Future[C]) -> bool:
    """Tell whether an attempt failed, or its connection has ended since."""
    return attempt.done() and (attempt.exception() is not None or not attempt.result().alive)
