"""Ownership of checkpoint directories: one program saves there at a time, and prunes its own.

A run that resumes keeps its identity, and prunes what it saved before. Readers take no lock and
write nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from orchestrator.engine.ranks import plain_names
from orchestrator.engine.ranks.ranks import gather_values

LOCK = ".writer.lock"


@dataclass(frozen=True)
class TrainingRun:
    """The training that a checkpoint belongs to, as its manifest records it."""

    id: str = ""
    program: str = ""
    host: str = ""
    pid: int = 0
    # A hash of the names and shapes of the parameters.
    model: str = ""

    def __str__(self) -> str:
        return f"{self.program} on {self.host} (process {self.pid})" if self.program else "a run"


def new_run(model: nn.Module, *, built_in: bool) -> TrainingRun:
    """Return an identity for this training, equal on all ranks. Call it before sharding."""
    program = "the built-in engine" if built_in else Path(sys.argv[0]).name or "python"
    run = TrainingRun(
        secrets.token_hex(8), program, socket.gethostname(), os.getpid(), shape_of(model)
    )
    return gather_values(run)[0]


def shape_of(model: nn.Module) -> str:
    shapes = sorted(
        (name, tuple(value.shape)) for name, value in plain_names.named_parameters(model)
    )
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]


def run_of(progress: Any) -> TrainingRun | None:
    """Return the run of a checkpoint, or None if an earlier version saved it without one."""
    data = progress.get("run") if isinstance(progress, Mapping) else None
    if not isinstance(data, Mapping):
        return None
    return TrainingRun(
        **{item.name: data[item.name] for item in fields(TrainingRun) if item.name in data}
    )


def attempt_number() -> int:
    """Return the number of this attempt of the job, counted by its head from 1."""
    return int(os.environ.get("ORCHESTRATOR_ATTEMPT", "1"))


def is_of_run(run: TrainingRun, progress: Any) -> bool:
    other = run_of(progress)
    return other is None or other.id == run.id


def saved_by(progress: Any, created: float) -> str:
    run, when = run_of(progress), time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created))
    return f"saved by {run}, {when}" if run else f"saved {when}"


# The locked descriptors of the directories that this process saves into.
_locked: dict[Path, int] = {}


def is_locked(directory: Path) -> bool:
    """Return True if this process has the lock of a directory."""
    return directory.resolve() in _locked


def lock_directory(directory: Path) -> bool:
    """Lock a directory until unlock_directory() or the end; return False if it is locked already.

    NFS has no locks for directories, so a file in the directory is locked there. On a file system
    without any locks, every program may save.
    """
    as_directory, as_file = os.O_RDONLY | os.O_DIRECTORY, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    for path, flags in ((directory, as_directory), (directory / LOCK, as_file)):
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:
            os.close(descriptor)
            continue
        _locked[directory.resolve()] = descriptor
        break
    return True


def unlock_directory(directory: Path) -> None:
    if (descriptor := _locked.pop(directory.resolve(), None)) is not None:
        with contextlib.suppress(OSError):
            # Workers may have inherited the descriptor, so closing it does not unlock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
