"""Notes since when the GPUs that a job holds have done nothing, for all who share the machine.

The note lies beside the job's entry in the machine's book. A part of a GPU has no use of its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence

from orchestrator.common import files

TO_READ = 0o644
OLD_SECONDS = 60.0  # a note that says nothing of now
LARGEST_BYTES = 1 << 12


def place_of(entry: str) -> str:
    return f"{entry[: -len('.json')]}.use"


class HeldGpus:
    """The GPUs of one job, and when they were last seen at work."""

    def __init__(self, entry: str) -> None:
        self.path, self.keys = place_of(entry) if entry else "", keys_of(entry)
        self.busy = time.time()

    def note(self, places: Sequence[str], use: Sequence[float | None]) -> float | None:
        """Note what they do now; return for how long it was nothing, if each of them tells."""
        mine = [
            value
            for place, value in zip(places, use)  # noqa: B905  Python 3.9 has no strict
            if place and any(key.startswith(f"gpu-{place}") for key in self.keys)
        ]
        if not mine or len(mine) < len(self.keys) or None in mine:
            return None
        now = time.time()
        if any(mine) or self.busy > now:
            self.busy = now
        note = json.dumps({"seen": now, "busy": self.busy})
        files.replace(self.path, note, TO_READ, exactly=True)
        return now - self.busy


def keys_of(entry: str) -> tuple[str, ...]:
    try:
        with files.open_plain(entry) as file:
            return tuple(map(str, json.loads(file.read())["keys"]))
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def read(entry: str) -> tuple[int, float] | None:
    """Return whose note is beside an entry, and the seconds in it; None where it is not of now."""
    try:
        with files.open_plain(place_of(entry)) as file:
            known = json.loads(file.read(LARGEST_BYTES))
            seen, busy = float(known["seen"]), float(known["busy"])
            owner = os.fstat(file.fileno()).st_uid
    except (OSError, ValueError, KeyError, TypeError):
        return None
    old = abs(time.time() - seen) > OLD_SECONDS
    return None if old or not busy <= seen else (owner, seen - busy)
