"""Know whose checkpoints a directory holds: one program saves there at a time, and prunes its own.

A run that resumes goes on as the same run: it prunes what it saved before. Readers need no
permission and leave no trace.
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
from orchestrator.engine.ranks.ranks import gather

LOCK = ".writer.lock"


@dataclass(frozen=True)
class TrainingRun:
    """The training that a checkpoint belongs to, as its manifest has it."""

    id: str = ""
    program: str = ""
    host: str = ""
    pid: int = 0
    model: str = ""  # stands for the names and shapes of the parameters

    def __str__(self) -> str:
        return f"{self.program} on {self.host} (process {self.pid})" if self.program else "a run"


def new_run(model: nn.Module, *, built_in: bool) -> TrainingRun:
    """Name this program's training, the same on all ranks; before the model is sharded."""
    program = "the built-in engine" if built_in else Path(sys.argv[0]).name or "python"
    run = TrainingRun(
        secrets.token_hex(8), program, socket.gethostname(), os.getpid(), shape_of(model)
    )
    return gather(run)[0]


def shape_of(model: nn.Module) -> str:
    shapes = sorted((name, tuple(value.shape)) for name, value in plain_names.parameters(model))
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]


def run_of(progress: Any) -> TrainingRun | None:
    """Read whose a checkpoint is; None for one of an earlier version, which did not say it."""
    data = progress.get("run") if isinstance(progress, Mapping) else None
    if not isinstance(data, Mapping):
        return None
    return TrainingRun(
        **{item.name: data[item.name] for item in fields(TrainingRun) if item.name in data}
    )


def attempt() -> int:
    """Return which attempt of the job this is, as its head counts them."""
    return int(os.environ.get("ORCHESTRATOR_ATTEMPT", "1"))


def is_of(run: TrainingRun, progress: Any) -> bool:
    other = run_of(progress)
    return other is None or other.id == run.id


def saved_by(progress: Any, created: float) -> str:
    run, when = run_of(progress), time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created))
    return f"saved by {run}, {when}" if run else f"saved {when}"


_locked: dict[Path, int] = {}  # the descriptors of the directories that this process saves into


def is_locked(directory: Path) -> bool:
    """Return True if this process saves into a directory already."""
    return directory.resolve() in _locked


def lock(directory: Path) -> bool:
    """Return True if no other process saves into a directory: then this one alone may, until it
    ends. NFS has no locks for directories: a file in it stands for it there. Where a file system
    has no locks at all, no program is refused."""
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


def unlock(directory: Path) -> None:
    if (descriptor := _locked.pop(directory.resolve(), None)) is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # workers may have inherited the descriptor
        os.close(descriptor)
