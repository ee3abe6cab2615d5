"""Reads the trace of one rank: time computing, communicating, waiting for data and idle.

A trace of a GPU shows kernels: NCCL's are communication, all others compute. A trace of a CPU (as
torch 2.13 writes it) shows collectives as `gloo:all_reduce` on gloo's own threads, and on the
thread that trains only their start, `c10d::allreduce_`; the wait that may follow is not an event.
So it is unknown how much of an operation that starts a collective is computing (the node of the
autograd graph that runs FSDP2's reduce-scatter lasts as long as the reduce-scatter): such an
operation does not count, those inside it do.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.traces import chrome

Intervals = list[tuple[float, float]]
Spans = tuple[tuple[float, float], ...]  # milliseconds

KINDS = {"kernel", "cpu_op", "user_annotation"}
ARGS = ("Collective name", "Process Group Name")
PHASE = "orchestrator: "  # begins the names by which the training loop marks its phases


@dataclass(frozen=True)
class Rank:
    """One rank's share of all traced steps. Milliseconds, which add up to the whole:
    compute + exposed + data + idle = window; overlapped + exposed = communication."""

    steps: int
    window_ms: float
    compute_ms: float
    communication_ms: float
    overlapped_ms: float  # communication while something computes
    exposed_ms: float  # communication while nothing computes
    data_ms: float  # nothing runs, and the training waits for its next batch
    idle_ms: float
    collectives: dict[str, Spans]  # of each kind and group, in the order in which they began


class Event(NamedTuple):
    name: str
    kind: str  # `cat` in the file
    thread: Any
    start: float  # microseconds
    end: float
    args: dict[str, Any]

    @property
    def span(self) -> tuple[float, float]:
        return self.start, self.end


def read(path: Path) -> tuple[int | None, Rank]:
    """Return the rank that a trace says it is of, and what it says."""
    with chrome.opened(path) as trace:
        return trace.rank, of_rank(what_matters(trace.events()))


def what_matters(entries: Iterable[dict[str, Any]]) -> Iterator[Event]:
    """Drop the events of a trace that say nothing here."""
    for entry in entries:
        if entry["ph"] == "X" and entry.get("cat") in KINDS:
            start = chrome.number(entry["ts"])
            end = start + chrome.number(entry.get("dur", 0))
            known = entry.get("args") or {}
            args = {name: known[name] for name in ARGS if name in known}
            name = sys.intern(entry["name"])
            yield Event(name, entry["cat"], entry.get("tid"), start, end, args)


def of_rank(events: Iterable[Event]) -> Rank:
    found: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        found[sort_of(event)].append(event)
    on_device = bool(found["kernel"] or found["nccl"])
    communication = found["nccl"] if on_device else found["gloo"]
    talking = merge(event.span for event in communication)
    if on_device:  # kernels run later than the steps of the host that launched them
        compute = merge(event.span for event in found["kernel"])
        whole: Intervals = []
    else:
        compute = computing(found["cpu"], {event.thread for event in found["gloo"]})
        whole = merge(event.span for event in found["step"])
    ends = whole or [*talking[:1], *talking[-1:], *compute[:1], *compute[-1:]]
    window = [(min(start for start, _ in ends), max(end for _, end in ends))] if ends else []
    compute, talking = intersect(compute, window), intersect(talking, window)
    busy = merge([*compute, *talking])
    waiting = intersect(merge(event.span for event in found["data"]), window)
    both = length(intersect(compute, talking))
    data = length(waiting) - length(intersect(waiting, busy))
    return Rank(
        steps=max(len({event.name for event in found["step"]}), 1),
        window_ms=length(window) / 1e3,
        compute_ms=length(compute) / 1e3,
        communication_ms=length(talking) / 1e3,
        overlapped_ms=both / 1e3,
        exposed_ms=(length(talking) - both) / 1e3,
        data_ms=data / 1e3,
        idle_ms=(length(window) - length(busy) - data) / 1e3,
        collectives=collectives_of(communication),
    )


def sort_of(event: Event) -> str:
    """Name what an event is; RCCL on AMD uses the names of NCCL's kernels."""
    if event.kind == "kernel":
        return "nccl" if "nccl" in event.name or "rccl" in event.name else "kernel"
    if event.name.startswith("gloo:"):
        return "gloo"
    if event.kind == "cpu_op":
        return "cpu"
    if event.name.startswith("ProfilerStep#"):
        return "step"
    if event.name == f"{PHASE}data" or event.name.startswith("enumerate(DataLoader)"):
        return "data"
    return "other"


def computing(calls: Iterable[Event], gloo: set[Any]) -> Intervals:
    """Return when a CPU ran operations that neither are, nor start, nor belong to a collective."""
    threads: defaultdict[Any, list[Event]] = defaultdict(list)
    for call in calls:
        if call.thread not in gloo:
            threads[call.thread].append(call)
    return merge(span for of_thread in threads.values() for span in computing_calls(of_thread))


def computing_calls(calls: list[Event]) -> Iterator[tuple[float, float]]:
    """Go through a thread's operations in the order in which they began, outer ones first."""
    calls.sort(key=lambda call: (call.start, -call.end))
    counts = [True] * len(calls)
    around: list[int] = []  # the operations within which this one began
    collective_ends = float("-inf")
    for at, call in enumerate(calls):
        while around and calls[around[-1]].end <= call.start:
            around.pop()
        if re.match(r"_?c10d", call.name):
            collective_ends = max(collective_ends, call.end)
            for outer in around:
                counts[outer] = False
        counts[at] = call.end > collective_ends
        around.append(at)
    return (call.span for call, counted in zip(calls, counts, strict=True) if counted)


def collectives_of(events: Iterable[Event]) -> dict[str, Spans]:
    """List collectives: each has the same name and position on every rank of its group.

    NCCL's events name the group; gloo's do not, and all groups of a rank are one then.
    """
    spans: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.span):
        kernel = re.match(r"[nr]ccl\w*?Kernel_([A-Za-z]+)", event.name)
        plain = kernel[1] if kernel else event.name.partition("(")[0]
        kind = str(event.args.get("Collective name", plain))
        group = event.args.get("Process Group Name")
        key = kind if group is None else f"{kind} in group {group}"
        spans[key].append((event.start / 1e3, event.end / 1e3))
    return {key: tuple(of_kind) for key, of_kind in spans.items()}


# -- intervals ------------------------------------------------------------------------------------
# (start, end), sorted and without overlaps once they are merged.


def merge(intervals: Iterable[tuple[float, float]]) -> Intervals:
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif start < end:
            merged.append((start, end))
    return merged


def intersect(first: Intervals, other: Intervals) -> Intervals:
    """Intersect two merged lists."""
    both: Intervals = []
    i = j = 0
    while i < len(first) and j < len(other):
        start, end = max(first[i][0], other[j][0]), min(first[i][1], other[j][1])
        if start < end:
            both.append((start, end))
        if first[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return both


def length(merged: Intervals) -> float:
    return sum(end - start for start, end in merged)
