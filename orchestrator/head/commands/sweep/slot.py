"""One member of a sweep as a process of its own: a launch in the background, and its slot.

The slot is a file that this process holds locked, and in which it writes how far it is: lines of
JSON. Whoever leads the sweep reads them, also one that comes later. A process that finds its slot
removed starts nothing, so no member runs twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from orchestrator.common import files
from orchestrator.common.errors import OrchestratorError
from orchestrator.head.background.process import Answers, Background
from orchestrator.protocol.message import Check, Moment, Nonsense, decode, parse

if TYPE_CHECKING:
    from orchestrator.config.launch import LaunchArguments


@dataclass(frozen=True)
class Said:
    """Tells what a line of the file may hold."""

    since: Moment = 0.0
    pid: Annotated[int, Check("a process", lambda pid: 1 < pid < 1 << 31)] = 2
    host: str = ""
    place: str = ""
    error: str = ""
    fix: str = ""
    code: int = 0


@dataclass(frozen=True)
class Slot:
    """The file of one member that was given out and has not been written down as ended."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    def send(self, **message: Any) -> None:
        """Write down what the launch answers; a full disk loses it, and the records still tell."""
        if "say" in message:
            return
        with contextlib.suppress(OSError), self.path.open("ab", buffering=0) as file:
            file.write(json.dumps(message).encode() + b"\n")

    def read(self) -> dict[str, Any]:
        """Return all that is known of its process: since, pid, host, queued, place, error."""
        known: dict[str, Any] = {}
        with contextlib.suppress(OSError):
            for line in self.path.read_bytes().splitlines():
                with contextlib.suppress(Nonsense):  # a disk was full
                    said = parse(line)
                    decode(Said, said, newer=True)
                    known.update(said)
        return known

    def take(self) -> int | None:
        """Lock it until this process ends; None where another has it, or it was removed."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == self.path.stat().st_ino:
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)
        return None

    @property
    def held(self) -> bool:
        """Tell whether its process lives; else let go of it at once."""
        descriptor = self.take()
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is None and self.path.exists()

    def make(self) -> None:
        """Make the file, safe on the disk: from here on the member is given out."""
        files.replace(self.path, json.dumps({"since": time.time()}) + "\n")

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def begin(
    slot: Slot, arguments: LaunchArguments, command: list[str], place: str | None = None
) -> Background:
    """Start the process of a member; with `place`, to follow the job that it has there."""
    return Background(sweep_member, slot=slot, arguments=arguments, command=command, place=place)


def sweep_member(
    _: Answers, slot: Slot, arguments: LaunchArguments, command: list[str], place: str | None
) -> None:
    """Launch a member and follow it to its end, as `master_launch` does; or follow it again."""
    held = slot.take()
    if held is None:
        return
    slot.send(pid=os.getpid(), host=socket.gethostname())
    from orchestrator.head.commands import follow, launching

    try:
        if place is None:
            launching.launch(slot, arguments, command)
        else:
            follow.take_up(slot, arguments.where, place)
    except OrchestratorError as error:
        slot.send(error=error.what, fix=error.fix, code=error.exit_code)
        raise
    except OSError as error:
        slot.send(error=f"{error.filename or ''}: {error.strerror}", fix="", code=1)
        raise
