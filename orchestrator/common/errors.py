"""Every error that a user can meet: what happened, why, and what to type next.

Raise them where the cause is known; cli/run.py prints them all. Each type has its exit code.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from orchestrator.common.program import how_to_add

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CHECK = 3
EXIT_NODE = 4
# A rank exits with this code to prevent a restart: see NoRestart.
EXIT_NO_RESTART = 93
EXIT_STOPPED = 130


class OrchestratorError(Exception):
    """A failure that is printed as a sentence, never as a stack trace."""

    exit_code = EXIT_FAILED

    def __init__(
        self, what: str, fix: str = "", *, names: Sequence[str] = (), about: str = ""
    ) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix
        # The names of the nodes that caused the error, where they are known.
        self.names = tuple(names)
        # The part of a long report that explains the error, with the worst problem first.
        self.about = about

    def __str__(self) -> str:
        return f"{self.what}\n  {self.fix}" if self.fix else self.what


class JobFailed(OrchestratorError):
    """The job ran and did not succeed."""

    exit_code = EXIT_FAILED

    def __init__(
        self, what: str, fix: str = "", *, exit_code: int = EXIT_FAILED, verdict: object = None
    ) -> None:
        super().__init__(what, fix)
        self.exit_code = exit_code
        # A Verdict, if the Python API raises the error.
        self.verdict = verdict


class UsageError(OrchestratorError):
    """An option, config or node list that makes no sense as written."""

    exit_code = EXIT_USAGE


class CheckFailed(OrchestratorError):
    """A problem found before anything was started: a launch now would fail or mislead."""

    exit_code = EXIT_CHECK


def no_linux() -> CheckFailed:
    """Return the error where nodes are to be reached from a machine of another kind."""
    return CheckFailed(
        f"nodes are reached from Linux or a Mac, and this machine is {sys.platform}",
        "type it on one of the nodes, on another machine that reaches them by ssh, or in WSL 2",
    )


class NodeError(OrchestratorError):
    """One or more nodes could not be reached, or were lost."""

    exit_code = EXIT_NODE


class NoKey(NodeError):
    """This machine has no SSH key at all."""


class NoRestart(Exception):
    """Raised in a rank by the user's program: the job fails, and is not to be started again."""


class StoppedEarly(OrchestratorError):
    """The job was stopped while it was being started."""

    exit_code = EXIT_STOPPED


EMPTY = "is the variable set that it comes from?"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return '; did you mean X?' or '', to append to an error about an unknown word."""
    # Most commands do not need this import.
    import difflib

    # Users may write HYBRID_SHARD for hybrid_shard.
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.5)
    return f"; did you mean {lower[close[0]]!r}?" if close else ""


def nearest_file(path: str | os.PathLike[str], ends: tuple[str, ...]) -> str:
    """Return '; did you mean X?' for a missing file with a similar neighbour, else ''."""
    try:
        folder, name = os.path.split(path)
        names = [entry.name for entry in os.scandir(folder or ".") if entry.is_file()]
    except (OSError, ValueError):
        return ""
    return (
        "" if name in names else did_you_mean(name, [each for each in names if each.endswith(ends)])
    )


def import_optional(module: str, package: str, need: str) -> Any:
    """Import a module of an optional package, or raise an error that says how to install it.

    `need` begins a sentence about the package, such as "these data need the package X, which".
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CheckFailed(
            f"{need} {sys.executable} does not have ({error})",
            how_to_add(package),
        ) from None
