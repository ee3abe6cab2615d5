"""The disk of this machine that files pass over, where one node cannot call another."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestrator.common import files
from orchestrator.common.errors import NodeError
from orchestrator.common.text import size

PREFIX = ".orchestrator-passing-"
LOOK_SECONDS = 1.0  # between two looks whether it is still wanted, while others need the room
FIX = "make room there, or let the nodes reach each other, so that no file comes through here"


class Room:
    """A directory on this disk for each file; it is never promised to more than it holds."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.taken = 0  # bytes that others will have here
        self.changed = threading.Condition()

    @contextlib.contextmanager
    def of(self, what: str, count: int, stopped: Callable[[], None]) -> Iterator[Path]:
        """Give room for so many bytes, waiting for others who have it now; NodeError: too few."""
        try:
            self.place.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.delete_abandoned(self.place, PREFIX)
            with self.changed:
                while (free := shutil.disk_usage(self.place).free) < self.taken + count:
                    if not self.taken:
                        raise NodeError(
                            f"{what} has {size(count)} and would come through this machine, but"
                            f" {self.place} has {size(free)} free",
                            FIX,
                        )
                    self.changed.wait(LOOK_SECONDS)
                    stopped()
                self.taken += count
        except OSError as error:
            raise self.broken(error) from error
        try:
            with tempfile.TemporaryDirectory(prefix=PREFIX, dir=self.place) as path:
                yield Path(path)
        except OSError as error:
            raise self.broken(error) from error
        finally:
            with self.changed:
                self.taken -= count
                self.changed.notify_all()

    def broken(self, error: OSError) -> NodeError:
        why = error.strerror or str(error)
        return NodeError(f"files cannot come through this machine, in {self.place}: {why}", FIX)
