"""Names what a head asks about Python environments on a node."""

from __future__ import annotations

from typing import Optional

from orchestrator.protocol.message import Count, Few, Message
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
    root: str = ""  # the directory of all environments; the usual one
    name: str = ""


class BuildEnvironment(Request[Nothing], do="build_environment"):
    """Begin to make an environment from the wheels of a tree that is here."""

    key: str
    tree: str  # its digest
    root: str = ""
    name: str = ""


class BuildProgress(Message):
    """The state of what was begun: building, ready or failed."""

    state: str
    step: str
    problem: str = ""
    packages: Optional[dict[str, str]] = None


class AskBuild(Request[BuildProgress], do="ask_build"):
    """Ask how far the environment is."""


class PrunedEnvironments(Message):
    """The environments that are gone; `freed` in bytes."""

    removed: tuple[str, ...]
    freed: Count


class PruneEnvironments(Request[PrunedEnvironments], do="prune_environments"):
    """Remove the environments that no name leads to and no job uses."""

    root: str = ""
