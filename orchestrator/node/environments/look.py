"""Describes this machine's Python for those who bring wheels, and one environment on it."""

from __future__ import annotations

import contextlib
import os
import platform
import sys

from orchestrator.node.environments.place import Environments
from orchestrator.protocol.requests.environments import EnvironmentState, LookAtEnvironment


def look(request: LookAtEnvironment) -> EnvironmentState:
    """Look whether an environment is whole; where it is, names lead to it from now on."""
    here = Environments(request.root)
    packages = here.packages(request.key)
    if packages is not None:
        here.link_all(request.name, request.key)
    return EnvironmentState(
        path=here.path(request.key),
        python=sys.executable,
        version=sys.version_info[:2],
        machine=platform.machine(),
        libc=libc(),
        packages=packages,
    )


def libc() -> str:
    """Return glibc 2.36, or musl."""
    with contextlib.suppress(OSError, ValueError):
        name = os.confstr("CS_GNU_LIBC_VERSION")
        if name:
            return name
    return "musl"
