"""The traces in a directory, read one after the other; of each rank, what the rest needs to know.

A trace is never in memory whole: see traces/chrome.py.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.common.errors import UsageError
from orchestrator.head.screen.lines import clean
from orchestrator.traces import chrome, overlap
from orchestrator.traces.overlap import Overlap
from orchestrator.traces.rank import Rank, of_rank, what_matters, what_travels

# What is written beside the traces, by us.
SUMMARY, CLOCKS, MERGED, PICTURE = (
    *("summary.json", "clocks.json"),
    *("all_ranks.json.gz", "profile.svg"),
)
OWN = {SUMMARY, CLOCKS, MERGED, PICTURE}
BUCKETS = 40  # of durations: below 2**n microseconds
MOST_FILES = 4096


class Counted:
    """Passes the events of a trace on, and remembers when it began and how long they took."""

    def __init__(self, entries: Iterable[dict[str, Any]]) -> None:
        self.entries = entries
        self.began = math.inf
        self.durations = [0] * BUCKETS

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for entry in self.entries:
            if entry.get("ph") == "X" and entry.get("cat") != "Trace":
                self.began = min(self.began, chrome.number(entry["ts"]))
                self.durations[bucket(chrome.number(entry.get("dur", 0)))] += 1
            yield entry


def bucket(microseconds: float) -> int:
    return min(BUCKETS - 1, max(0, math.frexp(max(microseconds, 0.0))[1]))


@dataclass(frozen=True)
class Trace:
    """One rank's trace, as far as it is kept."""

    path: Path
    number: int
    rank: Rank
    about: Mapping[str, Any] = field(default_factory=dict)  # what the rank noted; a node wrote it
    base: float = 0.0  # microseconds of the Unix clock of its node
    began: float = 0.0  # its first event, after the base
    durations: Sequence[int] = ()

    @property
    def node(self) -> int:
        return count(self.about.get("node"), -1)

    @property
    def host(self) -> str:
        host = self.about.get("host", "")
        return clean(host.encode(errors="replace").decode()[:80]) if isinstance(host, str) else ""

    @property
    def label(self) -> str:
        return f"rank {self.number} ({self.host})" if self.host else f"rank {self.number}"


def count(value: Any, otherwise: int) -> int:
    """Take a number that a node wrote, if it is one."""
    plain = isinstance(value, int) and not isinstance(value, bool)
    return value if plain and 0 <= value < 1 << 31 else otherwise


def paths_in(directory: Path) -> list[Path]:
    """List the traces of a directory; without any, of the newest directory in it."""
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return []
    paths = [
        path
        for path in entries
        if path.name.endswith((".json", ".json.gz"))
        and path.name not in OWN
        and not path.name.startswith(".")
        and path.is_file()
    ]
    return paths[:MOST_FILES]


def newest(profiles: Path) -> Path | None:
    """Return the directory whose traces were written last: the profiles' own, or one in it."""
    try:
        below = [path for path in profiles.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return None
    times = {
        directory: max(path.stat().st_mtime for path in paths)
        for directory in [profiles, *below]
        if (paths := paths_in(directory))
    }
    return max(times, key=lambda directory: times[directory], default=None)


def read(paths: Sequence[Path], progress: Callable[[int], None] = lambda _: None) -> list[Trace]:
    """Read traces, one per rank, in the order of the ranks."""
    traces: dict[int, Trace] = {}
    for index, path in enumerate(paths):
        trace = read_one(path, index)
        if trace.number in traces:
            raise UsageError(
                f"{path} is a second trace of rank {trace.number}, beside"
                f" {traces[trace.number].path.name}",
                "leave the traces of one profile in a directory",
            )
        traces[trace.number] = trace
        progress(path.stat().st_size)
    return [traces[number] for number in sorted(traces)]


def read_one(path: Path, index: int) -> Trace:
    with chrome.opened(path) as trace, chrome.understood(path):
        counted = Counted(trace.events())
        rank = of_rank(what_matters(counted))
        named = re.search(r"rank_?(\d+)", path.name)
        number = trace.rank
        if number is None:
            number = int(named[1]) if named else index
        began = counted.began if counted.began < math.inf else 0.0
        about, base = trace.about, trace.base
    return Trace(path, number, rank, about, base, began, tuple(counted.durations))


def compared(traces: Sequence[Trace]) -> Overlap:
    return overlap.compare({trace.number: trace.rank for trace in traces})


# -- one clock ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clocks:
    """How far each rank's clock is ahead of a common one, in microseconds, and how that is known.

    how: measured (by the head), collectives (all ranks leave one together), or none.
    """

    how: str
    ahead: Mapping[int, float]
    error_ms: float | None = None


def clocks(traces: Sequence[Trace], measured: Mapping[int, tuple[float, float]]) -> Clocks:
    """Put all ranks on one clock; `measured` has seconds ahead and their error, by node."""
    nodes = {trace.node for trace in traces}
    if nodes <= set(measured):
        ahead = {trace.number: measured[trace.node][0] * 1e6 for trace in traces}
        error = max((measured[node][1] for node in nodes), default=0.0)
        return Clocks("measured", ahead, error * 1e3)
    if len(nodes) > 1 or -1 in nodes:
        by_collectives = from_collectives(traces)
        if by_collectives is not None:
            return Clocks("collectives", by_collectives)
    return Clocks("none", {trace.number: 0.0 for trace in traces})


def from_collectives(traces: Sequence[Trace]) -> dict[int, float] | None:
    """Take the ends of all-reduces for one moment: nobody has the sum before all have sent."""
    first = traces[0]
    ahead = {first.number: 0.0}
    for trace in traces[1:]:
        gaps = [
            (trace.base + mine[1] * 1e3) - (first.base + other[1] * 1e3)
            for name, spans in trace.rank.collectives.items()
            if what_travels(name) == "gradients"
            and len(spans) == len(first.rank.collectives.get(name, ()))
            for mine, other in zip(spans, first.rank.collectives[name], strict=True)
        ]
        if not gaps:
            return None
        ahead[trace.number] = statistics.median(gaps)
    return ahead
