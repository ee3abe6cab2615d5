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
PRCTL = ctypes.CDLL(None).prctl  # found before a fork, after which another thread's lock may stay


Limits = list[tuple[int, int, int]]  # kind, soft, hard


class AgentStart(TypedDict):
    """All that torchrun starts with, but for what its standard output is."""

    command: list[str]
    environment: dict[str, str]
    umask: int  # -1: as it is
    limits: Limits
    # `-m` puts it on torchrun's path; the ranks go to the workdir.
    directory: str
    supervisor: int  # PID


def prctl(option: int, value: int) -> None:
    PRCTL(option, value, 0, 0, 0)


def limits() -> Limits:
    """Return the limits of this process."""
    kinds = sorted({v for n, v in vars(resource).items() if n.startswith("RLIMIT_")})
    return [(kind, *resource.getrlimit(kind)) for kind in kinds]


def with_room(known: Limits) -> Limits:
    """Return limits with as many open files as may be: node 0's torchrun has the store of all."""
    files = resource.RLIMIT_NOFILE
    return [(kind, hard if kind == files else soft, hard) for kind, soft, hard in known]


def set_limits(wanted: Limits) -> None:
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
