"""Finds the traces in a directory, and writes them as one trace of all ranks for ui.perfetto.dev.

A trace is never in memory whole: see traces/chrome.py.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.common import files
from orchestrator.common.errors import UsageError
from orchestrator.head.screen.lines import clean
from orchestrator.traces import chrome
from orchestrator.traces.rank import Rank, of_rank, what_matters

ALL_RANKS = "all_ranks.json.gz"
# Earlier versions also wrote clocks.json.
OURS = {"summary.json", "clocks.json", ALL_RANKS}
MOST_FILES = 4096
# Of each kind of event, the fields that are copied beside its name, place and time.
COPIED = {"X": ("dur", "args"), "s": ("id",), "t": ("id",), "f": ("id", "bp")}
# How many numbers of processes and threads each rank has.
NUMBERS = 1 << 11


@dataclass(frozen=True)
class RankTrace:
    """One rank's trace, as far as it is kept. What the rank noted in it is not trusted."""

    path: Path
    number: int
    rank: Rank
    host: str
    base: float  # microseconds of the Unix clock of its node

    @property
    def label(self) -> str:
        return f"rank {self.number} ({self.host})" if self.host else f"rank {self.number}"


def paths_in(directory: Path) -> list[Path]:
    """List the traces of a directory."""
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return []
    traces = [path for path in entries if path.name.endswith((".json", ".json.gz"))]
    named = [path for path in traces if path.name not in OURS and path.name[0] != "."]
    return [path for path in named if path.is_file()][:MOST_FILES]


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


def read(
    paths: Sequence[Path], progress: Callable[[int], None] = lambda _: None
) -> list[RankTrace]:
    """Read traces, one per rank, in the order of the ranks."""
    traces: dict[int, RankTrace] = {}
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


def read_one(path: Path, index: int) -> RankTrace:
    with chrome.opened(path) as trace:
        rank = of_rank(what_matters(trace.events()))
        number = trace.rank
        if number is None:
            named = re.search(r"rank_?(\d+)", path.name)
            number = int(named[1]) if named else index
        host = trace.about.get("host")
        shown = clean(host.encode(errors="replace").decode()[:80]) if isinstance(host, str) else ""
        return RankTrace(path, number, rank, shown, trace.base)


# -- one trace of all ranks -----------------------------------------------------------------------


def write(
    traces: Sequence[RankTrace], out: Path, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Write one Chrome trace: each rank is a process named "rank 3 (host)", each GPU another."""
    with files.replacing(out) as file, gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1) as z:
        z.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        comma = b""
        for trace in traces:
            shift = trace.base - traces[0].base - ahead(trace, traces[0])
            for event in copied(trace, shift):
                z.write(comma + json.dumps(event).encode("ascii"))
                comma = b",\n"
            progress(trace.path.stat().st_size)
        z.write(b"\n]}\n")


def ahead(trace: RankTrace, other: RankTrace) -> float:
    """Return by how many microseconds the clock of a rank's node is ahead of another's.

    All ranks leave a collective together, so its ends are one moment.
    """
    gaps = [
        (trace.base + mine[1] * 1e3) - (other.base + theirs[1] * 1e3)
        for name, spans in trace.rank.collectives.items()
        if len(spans) == len(other.rank.collectives.get(name, ()))
        for mine, theirs in zip(spans, other.rank.collectives[name], strict=True)
    ]
    return statistics.median(gaps) if gaps else 0.0


def copied(trace: RankTrace, shift: float) -> Iterator[dict[str, Any]]:
    """Yield the events of one rank, with numbers that are its own among all ranks'."""
    names: dict[str, str] = {}
    numbers: dict[str, int] = {}
    with chrome.opened(trace.path) as opened:
        for event in opened.events():
            process, thread = str(event.get("pid")), f"{event.get('pid')}/{event.get('tid')}"
            args = chrome.dict_of(event.get("args"))
            if event.get("name") == "process_labels" and str(args.get("labels")).startswith("GPU"):
                names[process] = f"{trace.label} {args['labels']}"[:200]
            elif event.get("name") == "thread_name":
                names[thread] = str(args.get("name", ""))[:200]
            if event.get("ph") not in COPIED or event.get("cat") == "Trace":
                continue
            # Perfetto knows a thread by its number alone: two hosts may use the same.
            for place, kind in ((process, "process_name"), (thread, "thread_name")):
                if place not in numbers:
                    numbers[place] = trace.number * NUMBERS + len(numbers) + 1
                    name = {"name": names.get(place, trace.label if kind[0] == "p" else "")}
                    where = {"pid": numbers[process], "tid": numbers[place]}
                    yield {"ph": "M", "name": kind, **where, "ts": 0, "args": name}
            kept = {name: event[name] for name in COPIED[event["ph"]] if name in event}
            if "id" in kept:
                kept["id"] = f"{trace.number}.{kept['id']}"
            yield {
                "ph": event["ph"],
                "cat": str(event.get("cat", "")),
                "name": str(event.get("name", "")),
                "pid": numbers[process],
                "tid": numbers[thread],
                "ts": round(chrome.number(event["ts"]) + shift, 3),
                **kept,
            }
