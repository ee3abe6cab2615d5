"""Many nodes' endings -> one cause: which node, which rank, what, which line of the user's."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# What a rank says when another one is gone. It failed because of that one, not by itself.
ECHO = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process exited"
    r"|DistBackendError|DistNetworkError|DistStoreError|socket timeout|timed out (waiting|after)"
    r"|wait timeout|unhandled (system|cuda) error, NCCL|RendezvousConnectionError"
    r"|failed to connect|recvBytes|TCPStore",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """One thing that went wrong on one node, at a time of the head's clock."""

    node: int
    node_name: str
    rank: int | None
    time: float
    kind: str  # exception, exit, signal, torchrun, supervisor, lost
    message: str
    traceback: str = ""
    where: str = ""  # the user's own line: file:line in function

    @property
    def echo(self) -> bool:
        return self.kind == "exception" and bool(ECHO.search(self.message + self.traceback))

    @property
    def who(self) -> str:
        place = f"node {self.node} ({self.node_name})"
        return place if self.rank is None else f"rank {self.rank} on {place}"


def of_rank(node: int, name: str, event: dict[str, Any], time: float) -> Failure:
    """From the supervisor's event that a rank ended with something other than success."""
    rank, code, error = int(event["rank"]), int(event["code"]), event.get("error")
    if code < 0:
        words = f"killed by signal {-code} ({signal_name(-code)})"
        return Failure(node, name, rank, time, "signal", words)
    if error:
        message = f"{error['type']}: {error['message']}" if error["message"] else error["type"]
        where = f"{error['file']}:{error['line']} in {error['function']}" if error["file"] else ""
        when = time - float(event["time"]) + float(error["time"])
        return Failure(node, name, rank, when, "exception", message, error["traceback"], where)
    return Failure(node, name, rank, time, "exit", f"ended with exit code {code}")


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def cause(failures: Sequence[Failure]) -> Failure | None:
    """The earliest that is not an echo of another; torchrun's own failure counts after a rank's."""

    def order(failure: Failure) -> tuple[int, float]:
        if failure.echo:
            return 2, failure.time
        return int(failure.kind in ("torchrun", "supervisor")), failure.time

    return min(failures, key=order, default=None)
