"""Measures for how long a rank wanted a core and had none: what its own machine did not give it.

A thread that is ready, and waits because others run, is delayed, as the kernel's scheduler counts;
so is one whose container has used up its quota. What a hypervisor gives to other machines is steal.
"""

from __future__ import annotations

import contextlib
import glob
import time
from collections.abc import Iterator
from pathlib import Path

LEAST_SECONDS = 0.1  # between two looks at all threads
DELAYS, STAT = "/proc/self/task/*/schedstat", Path("/proc/stat")
NANOSECONDS = 1e9


class Denied:
    """Adds up how long this process was held up by a lack of cores; 0 where nothing tells that."""

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.delays = dict(delays())
        self.stolen = steal()

    def seconds(self) -> float:
        """Return that time since the last call that was not too soon; 0 to one that is."""
        now = time.monotonic()
        if now - self.at < LEAST_SECONDS:
            return 0.0
        passed, self.at = now - self.at, now
        delays_before, self.delays = self.delays, dict(delays())
        stolen_before, self.stolen = self.stolen, steal()
        # Threads compute side by side: whoever waited longest has held all of them up.
        delayed = [delay - delays_before.get(thread, 0.0) for thread, delay in self.delays.items()]
        stolen, busy = (b - a for a, b in zip(stolen_before, self.stolen, strict=True))
        share = stolen / (stolen + busy) if stolen > 0 else 0.0
        return min(passed, max(delayed, default=0.0) + share * passed)


def delays() -> Iterator[tuple[str, float]]:
    """Yield each thread with the seconds that it has waited for a core so far."""
    for path in glob.glob(DELAYS):  # noqa: PTH207  half the time of a Path for each
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
            yield path, int(Path(path).read_text(encoding="ascii").split()[1]) / NANOSECONDS


def steal() -> tuple[int, int]:
    """Return the time that this machine's processors were stolen, and were busy, so far."""
    with contextlib.suppress(OSError, ValueError):
        words = STAT.read_text(encoding="ascii").partition("\n")[0].split()
        user, nice, system, _, _, irq, soft, stolen = map(int, words[1:9])
        return stolen, user + nice + system + irq + soft
    return 0, 0
