"""Answers a head's requests about Python environments."""

from __future__ import annotations

import platform
import sys

from orchestrator.node.environments.build import Build
from orchestrator.node.environments.place import Environments
from orchestrator.node.server.visit import Refusal, RoomState, ServerSession, answers
from orchestrator.node.transfer.checkout import CodeVisit
from orchestrator.protocol.requests.environments import (
    AskBuild,
    BuildEnvironment,
    BuildProgress,
    EnvironmentState,
    LookAtEnvironment,
)
from orchestrator.protocol.requests.request import Nothing


class EnvironmentVisit(RoomState):
    """The environment that this session's head has built."""

    build: Build | None = None


@answers(LookAtEnvironment)
def environment_state(visit: ServerSession, request: LookAtEnvironment) -> EnvironmentState:
    """Return the state of an environment; if it is complete, point its links to it."""
    here = Environments()
    packages = here.packages(request.key)
    libc, release = platform.libc_ver()
    if packages is not None:
        here.link_all(request.name, request.key)
    return EnvironmentState(
        path=here.path(request.key),
        version=sys.version_info[:2],
        machine=platform.machine(),
        libc=f"glibc {release}" if libc == "glibc" else "musl",
        packages=packages,
    )


@answers(BuildEnvironment)
def build_environment(visit: ServerSession, request: BuildEnvironment) -> Nothing:
    visit.of(EnvironmentVisit).build = Build(request, visit.of(CodeVisit).store)
    return Nothing()


@answers(AskBuild)
def ask_build(visit: ServerSession, request: AskBuild) -> BuildProgress:
    build = visit.of(EnvironmentVisit).build
    if build is None:
        raise Refusal("no environment is made here")
    return build.progress()
