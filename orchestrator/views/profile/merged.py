"""Write one Chrome trace of all ranks, on one clock: for ui.perfetto.dev or chrome://tracing.

Each rank is a process named "rank 3 (host)", each of its GPUs another. Events are copied one by
one; where there would be more than a viewer takes, each rank's shortest are left out.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from orchestrator.common import files
from orchestrator.traces import chrome
from orchestrator.views.profile.found import BUCKETS, Clocks, Trace, bucket

MOST_EVENTS = 2_000_000  # of all ranks: 0.5 GB for the viewer, which has 2 to 4
COPIED = {"X": ("dur",), "s": ("id",), "t": ("id",), "f": ("id", "bp"), "i": ("s",)}
PROCESS = 1 << 10  # numbers of processes that each rank has


def write(
    traces: Sequence[Trace],
    clocks: Clocks,
    out: Path,
    progress: Callable[[int], None] = lambda _: None,
    most: int = MOST_EVENTS,
) -> int:
    """Write the file; return how many events are left out."""
    origin = min(began(trace, clocks) for trace in traces)
    left_out = 0
    with files.replacing(out) as file, gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1) as z:
        z.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        comma = b""
        for trace in traces:
            copy = Copy(trace, clocks.ahead[trace.number] + origin, most // len(traces))
            for event in copy.events():
                z.write(comma + json.dumps(event).encode("ascii"))
                comma = b",\n"
            left_out += copy.left_out
            progress(trace.path.stat().st_size)
        z.write(b"\n]}\n")
    return left_out


def began(trace: Trace, clocks: Clocks) -> float:
    return trace.base + trace.began - clocks.ahead[trace.number]


def shortest(durations: Sequence[int], most: int) -> int:
    """Return the least bucket of durations that is copied, so that there are not more events."""
    total = 0
    for number in range(BUCKETS - 1, -1, -1):
        total += durations[number] if number < len(durations) else 0
        if total > most:
            return number + 1
    return 0


class Copy:
    """The events of one rank, with numbers and times that are its own among all ranks'."""

    def __init__(self, trace: Trace, shift: float, most: int) -> None:
        self.trace, self.shift = trace, shift
        self.least = shortest(trace.durations, most)
        self.left_out = 0
        self.labels: dict[Any, str] = {}  # process -> "CPU", "GPU 0"
        self.names: dict[tuple[Any, Any], str] = {}  # of threads
        self.processes: dict[Any, int] = {}
        self.threads: dict[tuple[Any, Any], int] = {}

    def events(self) -> Iterator[dict[str, Any]]:
        with chrome.opened(self.trace.path) as trace, chrome.understood(self.trace.path):
            for event in trace.events():
                if event.get("ph") == "M":
                    self.learn(event)
                elif event.get("ph") in COPIED and event.get("cat") != "Trace":
                    yield from self.copied(event)

    def learn(self, event: dict[str, Any]) -> None:
        args = chrome.dict_of(event.get("args"))
        if event.get("name") == "process_labels":
            self.labels[key(event.get("pid"))] = str(args.get("labels", ""))[:80]
        elif event.get("name") == "thread_name":
            where = key(event.get("pid")), key(event.get("tid"))
            self.names[where] = str(args.get("name", ""))[:200]

    def copied(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        phase = event["ph"]
        slow = phase == "X" and bucket(chrome.number(event.get("dur", 0))) >= self.least
        if self.least and not slow:  # the ends of an arrow may be gone, too
            self.left_out += phase == "X"
            return
        if phase == "i" and not isinstance(event.get("tid"), int):
            return  # the profiler's own, of no thread
        yield from self.introduced(event)
        kept = {name: event[name] for name in COPIED[phase] if name in event}
        if "id" in kept:
            kept["id"] = f"{self.trace.number}.{kept['id']}"
        if "args" in event:
            kept["args"] = event["args"]
        where = key(event.get("pid")), key(event.get("tid"))
        yield {
            "ph": phase,
            "cat": str(event.get("cat", "")),
            "name": str(event.get("name", "")),
            "pid": self.processes[where[0]],
            "tid": self.threads[where],
            "ts": round(self.trace.base + chrome.number(event["ts"]) - self.shift, 3),
            **kept,
        }

    def introduced(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Name a process and a thread before the first event in them."""
        process, thread = key(event.get("pid")), key(event.get("tid"))
        if process not in self.processes:
            number = self.trace.number * PROCESS + len(self.processes) + 1
            self.processes[process] = number
            label = self.labels.get(process, "")
            name = self.trace.label + (f" {label}" if label.startswith("GPU") else "")
            yield meta("process_name", number, 0, name=name)
            yield meta("process_sort_index", number, 0, sort_index=number)
        if (process, thread) not in self.threads:
            # Perfetto knows a thread by its number alone: two hosts may use the same.
            number = (self.trace.number * PROCESS + len(self.threads) + 1) * 2
            self.threads[process, thread] = number
            name = self.names.get((process, thread), "")
            if name:
                yield meta("thread_name", self.processes[process], number, name=name)


def meta(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": args}


def key(value: Any) -> str | int:
    """Return what a process or thread is known by; whatever else stands there is its text."""
    return value if isinstance(value, (str, int)) else str(value)
