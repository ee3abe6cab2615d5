"""Answers a head's requests about Python environments."""

from __future__ import annotations

import platform
import sys

from orchestrator.node.environments.build import Build
from orchestrator.node.environments.place import Environments
from orchestrator.node.server.session import Refusal, ServerSession, SessionState, answers
from orchestrator.node.transfer.checkout import CodeSession
from orchestrator.protocol.requests.environments import (
    AskBuild,
    BuildEnvironment,
    BuildProgress,
    EnvironmentState,
    LookAtEnvironment,
)
from orchestrator.protocol.requests.request import Nothing


class EnvironmentSession(SessionState):
    """The environment that this session's head has built."""

    build: Build | None = None


@answers(LookAtEnvironment)
def environment_state(session: ServerSession, request: LookAtEnvironment) -> EnvironmentState:
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
def build_environment(session: ServerSession, request: BuildEnvironment) -> Nothing:
    session.of(EnvironmentSession).build = Build(request, session.of(CodeSession).store)
    return Nothing()


@answers(AskBuild)
def ask_build(session: ServerSession, request: AskBuild) -> BuildProgress:
    build = session.of(EnvironmentSession).build
    if build is None:
        raise Refusal("no environment is made here")
    return build.progress()
