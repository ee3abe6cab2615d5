"""How a transfer to or from many nodes has ended."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.common.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NODE,
    OrchestratorError,
    UsageError,
)
from orchestrator.head.connect.channel import Declined


def exit_code(errors: Sequence[OrchestratorError | None], *, incomplete: bool) -> int:
    """Return 4 if a node could not be reached, 1 if one refused or not all files have come.

    A UsageError is about this machine: a DST that cannot be made.
    """
    failed = [error for error in errors if error is not None]
    if any(not isinstance(error, (Declined, UsageError)) for error in failed):
        return EXIT_NODE
    return EXIT_FAILED if failed or incomplete else EXIT_DONE


def in_lines(label: str, error: OrchestratorError) -> list[str]:
    """Write a node's error, and below it how to fix that."""
    return [f"{label}: {error.what}", *([f"  -> {error.fix}"] if error.fix else [])]
