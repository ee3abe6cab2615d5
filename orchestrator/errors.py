"""Every error that a user can meet: what happened, why, and what to type next.

Raised where it is known, printed in one place (cli.py), one exit code per type.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CHECK = 3
EXIT_NODE = 4
EXIT_STOPPED = 130


class OrchestratorError(Exception):
    """A failure that is told in words, never as a stack trace."""

    exit_code = EXIT_FAILED

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix

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
        self.verdict = verdict  # where the Python API raises it: a Verdict


class UsageError(OrchestratorError):
    """An option, a config or a node list that cannot be meant as written."""

    exit_code = EXIT_USAGE


class CheckFailed(OrchestratorError):
    """Found before anything was started: launching now would fail or mislead."""

    exit_code = EXIT_CHECK


class NodeError(OrchestratorError):
    """One or more nodes could not be reached, or were lost."""

    exit_code = EXIT_NODE


class Stopped(OrchestratorError):
    """The user stopped it."""

    exit_code = EXIT_STOPPED


def nearest(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?' or nothing, to be appended to an error about an unknown word."""
    lower = {one.lower(): one for one in known}  # HYBRID_SHARD is hybrid_shard to most people
    close = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.5)
    return f"; did you mean {lower[close[0]]!r}?" if close else ""
