"""Describes the process that becomes torchrun, from which all ranks of a node start.

All starts share one description: a cold start applies it between fork and exec, a standby process
applies it to itself. Imports nothing of this package: node/warm/standby.py loads it
by its path, into the process that the ranks are forked from.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from typing import TypedDict

PR_SET_PDEATHSIG = 1
# Looked up before a fork: after it, another thread may hold the loader's lock forever.
PRCTL = ctypes.CDLL(None).prctl


# Each limit is (kind, soft, hard).
Limits = list[tuple[int, int, int]]


class AgentStart(TypedDict):
    """Everything torchrun starts with except its standard output."""

    command: list[str]
    environment: dict[str, str]
    # The value -1 keeps the present umask.
    umask: int
    limits: Limits
    # With `-m`, Python adds this directory to torchrun's path; the ranks change to the workdir.
    directory: str
    supervisor: int  # PID


def prctl(option: int, value: int) -> None:
    PRCTL(option, value, 0, 0, 0)


def limits_with_room(known: Limits) -> Limits:
    """Return limits with the most open files allowed: node 0's torchrun hosts the store of all."""
    files = resource.RLIMIT_NOFILE
    return [(kind, hard if kind == files else soft, hard) for kind, soft, hard in known]


def set_limits(wanted: Limits) -> None:
    for kind, soft, hard in wanted:
        if resource.getrlimit(kind) != (soft, hard):
            resource.setrlimit(kind, (soft, hard))


def apply_settings(start: AgentStart) -> None:
    """Apply to this process the settings that torchrun inherits."""
    set_limits(start["limits"])
    if start["umask"] >= 0:
        os.umask(start["umask"])
    os.chdir(start["directory"])
    # If the supervisor is killed, torchrun must end its ranks, as their output is read no more.
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != start["supervisor"]:
        # The supervisor died before prctl(), so the kernel sends no signal.
        os.kill(os.getpid(), signal.SIGTERM)
