"""Say why a checkpoint was not saved: torch's writer hides the reason in a number."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from orchestrator.common import text
from orchestrator.common.errors import OrchestratorError

PROBE_BYTES = 1 << 16


@dataclass(frozen=True)
class Trouble:
    """Why a rank could not save: by its own fault, or because another one could not."""

    text: str = ""
    own: bool = False


def trouble_of(
    error: BaseException, directory: Path, index: int, state: Mapping[str, Tensor]
) -> Trouble:
    """Say why a save failed, and whether it was this rank, the one with this index, that failed."""
    if problem := disk_problem(directory):
        need = sum(value.numel() * value.element_size() for value in state.values())
        return Trouble(f"{problem}; a checkpoint takes {text.size(need)} in all", own=True)
    own = isinstance(error, CheckpointException) and index in error.failures
    return Trouble(first_cause(error), own)


def disk_problem(directory: Path) -> str:
    """Say what the disk says when it is written to.

    What this save has written is removed with it, so its size counts as free.
    """
    probe = directory / f".probe_{os.getpid()}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, bytes(PROBE_BYTES))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            probe.unlink()
    except FileNotFoundError:
        return ""
    except OSError as error:
        problem = f"{error.strerror or error} ({directory.parent})"
        with contextlib.suppress(OSError):
            disk = os.statvfs(directory)
            written = sum(512 * path.stat().st_blocks for path in directory.iterdir())
            free, whole = disk.f_bavail * disk.f_frsize + written, disk.f_blocks * disk.f_frsize
            problem += f", {text.size(free)} of {text.size(whole)} free"
            problem += ", no room for another file" if disk.f_files and not disk.f_favail else ""
        return problem
    return ""


def first_cause(error: BaseException) -> str:
    """Say in a line why the first rank failed, without the traces of the others."""
    if isinstance(error, CheckpointException) and error.failures:
        inner = next(iter(error.failures.values()))
        error = inner[0] if isinstance(inner, tuple) else inner
    lines = str(error).strip().splitlines()
    if isinstance(error, OrchestratorError):
        return error.what
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
