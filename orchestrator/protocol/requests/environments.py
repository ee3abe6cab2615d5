"""A head's requests about Python environments on a node."""

from __future__ import annotations

from typing import Optional

from orchestrator.protocol.message import Few, Message
from orchestrator.protocol.requests.request import Nothing, Request


class EnvironmentState(Message):
    """This machine's Python, and one environment on it."""

    path: str
    version: tuple[Few, Few]
    machine: str
    # Such as glibc 2.36, or musl.
    libc: str
    # Version by name; None if the environment must be built.
    packages: Optional[dict[str, str]] = None


class LookAtEnvironment(Request[EnvironmentState], do="look_at_environment"):
    """Return the state of an environment; if it is complete, point its links to it."""

    key: str
    name: str = ""


class BuildEnvironment(Request[Nothing], do="build_environment"):
    """Begin to build an environment from the wheels of an offered tree."""

    key: str
    # The digest of the tree.
    tree: str
    name: str = ""


class BuildProgress(Message):
    """The state of the build: building, ready or failed."""

    state: str
    step: str
    problem: str = ""
    packages: Optional[dict[str, str]] = None


class AskBuild(Request[BuildProgress], do="ask_build"):
    """Return the progress of the build."""
