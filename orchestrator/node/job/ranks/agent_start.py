"""Describes the process that becomes torchrun, from which all ranks of a node start.

One description for all starts: a cold one applies it between fork and exec, a process that has
waited applies it where it stands. Imports nothing of ours: node/warm/standby.py loads it
by its path, into the process that the ranks are forked from.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from typing import TypedDict

PR_SET_PDEATHSIG = 1
ENDLESS = resource.RLIM_INFINITY
STORE_OF_A_RANK = 3  # connections: its own, its groups', and that of a watchdog
PRCTL = ctypes.CDLL(None).prctl  # found before a fork, after which another thread's lock may stay


class AgentStart(TypedDict):
    """All that torchrun starts with, but for what its standard output is."""

    command: list[str]
    environment: dict[str, str]
    umask: int  # -1: as it is
    limits: list[tuple[int, int, int]]  # of the login: kind, soft, hard
    # `-m` puts it on torchrun's path; the ranks go to the workdir.
    directory: str
    supervisor: int  # PID


def prctl(option: int, value: int) -> None:
    PRCTL(option, value, 0, 0, 0)


def limits() -> list[tuple[int, int, int]]:
    """Return the limits of this process."""
    kinds = sorted({v for n, v in vars(resource).items() if n.startswith("RLIMIT_")})
    return [(kind, *resource.getrlimit(kind)) for kind in kinds]


def with_room(
    known: list[tuple[int, int, int]], nodes: int, nproc: int
) -> list[tuple[int, int, int]]:
    """Return limits under which node 0 of so many can have the store that all others ask.

    Each connection is an open file of torchrun there, and of the ranks that are forked from it. A
    job that needs few of them starts with the login's own limit.
    """
    connections = nodes * (1 + STORE_OF_A_RANK * nproc)

    def raised(soft: int, hard: int) -> int:
        if soft == ENDLESS or connections <= soft // 4:
            return soft
        return soft + connections if hard == ENDLESS else min(soft + connections, hard)

    files = resource.RLIMIT_NOFILE
    return [
        (kind, raised(soft, hard) if kind == files else soft, hard) for kind, soft, hard in known
    ]


def set_limits(wanted: list[tuple[int, int, int]]) -> None:
    for kind, soft, hard in wanted:
        if resource.getrlimit(kind) != (soft, hard):
            resource.setrlimit(kind, (soft, hard))


def settle(start: AgentStart) -> None:
    """Set in this process what it keeps when it becomes torchrun."""
    set_limits(start["limits"])
    if start["umask"] >= 0:
        os.umask(start["umask"])
    os.chdir(start["directory"])
    # Should the supervisor be killed, torchrun ends its ranks: nobody would read what they print.
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != start["supervisor"]:
        os.kill(os.getpid(), signal.SIGTERM)  # as the kernel would have told us
