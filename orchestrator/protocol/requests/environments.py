"""Names what a head asks about Python environments on a node."""

from __future__ import annotations

from typing import Optional

from orchestrator.protocol.message import Few, Message
from orchestrator.protocol.requests.request import Nothing, Request


class EnvironmentState(Message):
    """This machine's Python, and one environment on it."""

    path: str
    python: str
    version: tuple[Few, Few]
    machine: str  # x86_64, aarch64
    libc: str  # glibc 2.36, or musl
    packages: Optional[dict[str, str]] = None  # name -> version; None: it has to be made


class LookAtEnvironment(Request[EnvironmentState], do="look_at_environment"):
    """Look whether an environment is whole; where it is, names lead to it from now on."""

    key: str
    name: str = ""


class BuildEnvironment(Request[Nothing], do="build_environment"):
    """Begin to make an environment from the wheels of a tree that is here."""

    key: str
    tree: str  # its digest
    name: str = ""


class BuildProgress(Message):
    """The state of what was begun: building, ready or failed."""

    state: str
    step: str
    problem: str = ""
    packages: Optional[dict[str, str]] = None


class AskBuild(Request[BuildProgress], do="ask_build"):
    """Ask how far the environment is."""
