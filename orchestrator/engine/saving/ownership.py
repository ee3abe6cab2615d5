"""Know whose checkpoints a directory holds: one program saves there at a time, and prunes its own.

A run that resumes goes on as the same run: it prunes what it saved before. Readers need no
permission and leave no trace.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from orchestrator.common.errors import CheckFailed
from orchestrator.engine.ranks import plain_names
from orchestrator.engine.ranks.ranks import gather

LOCK = ".writer.lock"
EXPERIMENT = "ORCHESTRATOR_EXPERIMENT"  # its path, whose name has the head's time of the launch
MOST_ATTEMPTS = 1000


@dataclass(frozen=True)
class Run:
    """The training that a checkpoint belongs to, as its manifest has it."""

    id: str = ""
    program: str = ""
    host: str = ""
    pid: int = 0
    model: str = ""  # stands for the names and shapes of the parameters
    generation: int = 0  # rises each time that a program begins to save, over all attempts

    def __str__(self) -> str:
        return f"{self.program} on {self.host} (process {self.pid})" if self.program else "a run"


def new_run(model: nn.Module, *, built_in: bool) -> Run:
    """Name this program's training, the same on all ranks; before the model is sharded."""
    program = "the built-in engine" if built_in else Path(sys.argv[0]).name or "python"
    run = Run(secrets.token_hex(8), program, socket.gethostname(), os.getpid(), shape_of(model))
    return gather(run)[0]


def shape_of(model: nn.Module) -> str:
    shapes = sorted((name, tuple(value.shape)) for name, value in plain_names.parameters(model))
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]


def run_of(progress: Any) -> Run | None:
    """Read whose a checkpoint is; None for one of an earlier version, which did not say it."""
    data = progress.get("run") if isinstance(progress, Mapping) else None
    if not isinstance(data, Mapping):
        return None
    return Run(**{item.name: data[item.name] for item in fields(Run) if item.name in data})


def later_than(latest: int) -> int:
    """Number a program that begins to save: higher than all that it knows of, by the head's count.

    What it does not know of are the disks of nodes that are away. The head has launched it later
    than the jobs and the attempts that they are of, and no clock of a node is asked.
    """
    launched = re.findall(r"_([0-9]{8})_([0-9]{6})(?=[-/]|$)", os.environ.get(EXPERIMENT, ""))
    number = min(attempt(), MOST_ATTEMPTS - 1)
    current = int("".join(launched[-1])) * MOST_ATTEMPTS + number if launched else 0
    return max(current, latest + 1)


def attempt() -> int:
    """Return which attempt of the job this is, as its head counts them."""
    return int(os.environ.get("ORCHESTRATOR_ATTEMPT", "1"))


def is_of(run: Run, progress: Any) -> bool:
    other = run_of(progress)
    return other is None or other.id == run.id


def saved_by(progress: Any, created: float) -> str:
    run, when = run_of(progress), time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created))
    return f"saved by {run}, {when}" if run else f"saved {when}"


class WriterLock:
    """The right to save into a directory; this process may have it several times.

    It ends with the process, however that ends, and holds over NFS. Where a file system has no
    locks, no program is refused.
    """

    _held: dict[Path, tuple[int, int]] = {}  # noqa: RUF012  path -> descriptor, how many times

    def __init__(self, directory: Path) -> None:
        self.path = Path(os.path.realpath(directory), LOCK)
        self.locked = self.first = False  # first: nothing else in this process has it

    def acquire(self, run: Run) -> str:
        """Return nothing, or the run that holds it."""
        if self.path in self._held:
            descriptor, times = self._held[self.path]
            self._held[self.path] = descriptor, times + 1
            self.locked = True
            return ""
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                descriptor = os.open(self.path, flags, 0o666)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                raise CheckFailed(f"{self.path} is a symbolic link", "remove it") from None
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                owner = os.read(descriptor, 4096)
                os.close(descriptor)
                return str(read_run(owner))
            except OSError:  # no locks here
                os.close(descriptor)
                return ""
            if self._is_there(descriptor):
                break
            os.close(descriptor)  # its owner has just removed it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(run)).encode(), 0)
        self._held[self.path] = descriptor, 1
        self.locked = self.first = True
        return ""

    def _is_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(self.path.stat(), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if not self.locked:
            return
        self.locked = False
        descriptor, times = self._held[self.path]
        if times > 1:
            self._held[self.path] = descriptor, times - 1
            return
        del self._held[self.path]
        with contextlib.suppress(OSError):
            self.path.unlink()
        os.close(descriptor)


def read_run(content: bytes) -> Run:
    try:
        return run_of({"run": json.loads(content)}) or Run()
    except ValueError:
        return Run()
