"""Reads the trace of one rank: time computing, communicating and idle, and the longest operations.

A trace of a GPU shows kernels: NCCL's are communication, all others compute. A trace of a CPU (as
torch 2.13 writes it) shows collectives as `gloo:all_reduce` on gloo's own threads, and on the
thread that trains only their start, `c10d::allreduce_`; the wait that may follow is not an event.
So nobody knows how much of an operation that starts a collective is computing (the node of the
autograd graph that runs FSDP2's reduce-scatter lasts as long as the reduce-scatter): such an
operation does not count, those inside it do.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.traces import chrome
from orchestrator.traces.intervals import Intervals, Merged, intersect, length, merge

Spans = tuple[tuple[float, float], ...]  # milliseconds since anything

DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
KINDS = {*DEVICE, "cpu_op", "user_annotation"}
ARGS = ("Collective name", "Process Group Name")
PHASE = "orchestrator: "  # begins the names by which the training loop marks its phases
TOP = 10  # operations that are named
LONGEST_NAME = 200


class Operation(NamedTuple):
    """An operation of all traced steps, without what it calls in turn."""

    name: str
    ms: float
    calls: int


@dataclass(frozen=True)
class Rank:
    """One rank's share of all traced steps. Milliseconds, which add up to the whole:
    compute + exposed + copying + idle = window; overlapped + exposed = communication."""

    steps: int
    window_ms: float
    compute_ms: float
    communication_ms: float
    overlapped_ms: float  # communication while something computes
    exposed_ms: float  # communication while nothing computes
    copying_ms: float  # only copies to, from or on the device
    idle_ms: float
    collectives: dict[str, Spans]  # of each kind and group, in the order in which they began
    data_ms: float = 0.0  # of the idle time: while the training waits for its next batch
    optimizer_ms: float = 0.0  # in the optimizer's phase, on a CPU
    gpu: bool = False
    exposed_kinds: dict[str, float] = field(default_factory=dict)  # gradients, parameters, others
    top: tuple[Operation, ...] = ()


class Event(NamedTuple):
    name: str
    kind: str  # `cat` in the file
    thread: Any
    start: float  # microseconds
    end: float
    args: dict[str, Any]


def what_matters(entries: Iterable[dict[str, Any]]) -> Iterator[Event]:
    """Drop the events of a trace that say nothing here."""
    for entry in entries:
        if entry["ph"] == "X" and entry.get("cat") in KINDS:
            yield event_of(entry)


def event_of(entry: dict[str, Any]) -> Event:
    start = chrome.number(entry["ts"])
    end = start + chrome.number(entry.get("dur", 0))
    arguments = entry.get("args") or {}
    args = {name: arguments[name] for name in ARGS if name in arguments}
    return Event(sys.intern(entry["name"]), entry["cat"], entry.get("tid"), start, end, args)


def read(path: Path) -> tuple[int | None, Rank]:
    """Return the rank that a trace says it is of, and what it says."""
    with chrome.opened(path) as trace, chrome.understood(path):
        return trace.rank, of_rank(what_matters(trace.events()))


# -- sorted as they are read ----------------------------------------------------------------------


class Calls:
    """The operations of one thread of a CPU, in 20 bytes each."""

    def __init__(self) -> None:
        self.starts, self.ends, self.names = array("d"), array("d"), array("l")

    def add(self, start: float, end: float, name: int) -> None:
        self.starts.append(start)
        self.ends.append(end)
        self.names.append(name)


class Sorted:
    """The events of a trace by what they are, in one pass."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.kernels, self.copies = Merged(), Merged()
        self.steps: list[tuple[float, float]] = []
        self.data: list[tuple[float, float]] = []
        self.optimizer: list[tuple[float, float]] = []
        self.nccl: list[Event] = []
        self.gloo: list[Event] = []
        self.step_names: set[str] = set()
        self.threads: defaultdict[Any, Calls] = defaultdict(Calls)
        self.numbers: dict[str, int] = {}  # of the names of calls
        self.times: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        span = (event.start, event.end)
        if event.kind == "kernel":
            if is_nccl(event.name):
                self.nccl.append(event)
            else:
                self.note(event.name, event.end - event.start)
                self.kernels.add(*span)
        elif event.kind in DEVICE:
            self.copies.add(*span)
        elif event.name.startswith("gloo:"):
            self.gloo.append(event)
        elif event.kind == "cpu_op":
            number = self.numbers.setdefault(event.name, len(self.numbers))
            self.threads[event.thread].add(*span, number)
        elif event.name.startswith("ProfilerStep#"):
            self.steps.append(span)
            self.step_names.add(event.name)
        elif event.name == f"{PHASE}data" or event.name.startswith("enumerate(DataLoader)"):
            self.data.append(span)
        elif event.name == f"{PHASE}optimizer":
            self.optimizer.append(span)

    def note(self, name: str, microseconds: float) -> None:
        known = self.times[name]
        known[0] += microseconds
        known[1] += 1

    @property
    def on_device(self) -> bool:
        return bool(self.kernels.intervals or self.nccl)


def of_rank(events: Iterable[Event]) -> Rank:
    found = Sorted(events)
    on_device = found.on_device
    communication = found.nccl if on_device else found.gloo
    if on_device:
        compute, copies = merge(found.kernels.intervals), merge(found.copies.intervals)
    else:
        compute, copies = merge(_computing(found)), []
    spans = merge(map(_span, communication))
    # Kernels run later than the steps of the host that launched them.
    whole = [] if on_device else merge(found.steps)
    window = _window(whole or [*spans[:1], *spans[-1:], *compute[:1], *compute[-1:], *copies])
    computing, talking = intersect(compute, window), intersect(spans, window)
    both = length(intersect(computing, talking))
    working = merge([*computing, *talking])
    busy = intersect(merge([*working, *copies]), window)
    waiting = intersect(merge(found.data), window)
    return Rank(
        steps=max(len(found.step_names), 1),
        window_ms=length(window) / 1e3,
        compute_ms=length(computing) / 1e3,
        communication_ms=length(talking) / 1e3,
        overlapped_ms=both / 1e3,
        exposed_ms=(length(talking) - both) / 1e3,
        copying_ms=(length(busy) - length(working)) / 1e3,
        idle_ms=(length(window) - length(busy)) / 1e3,
        collectives=_collectives(communication),
        data_ms=(length(waiting) - length(intersect(waiting, busy))) / 1e3,
        optimizer_ms=0.0 if on_device else length(intersect(merge(found.optimizer), window)) / 1e3,
        gpu=on_device,
        exposed_kinds=_exposed(communication, computing, window),
        top=_top(found),
    )


def _window(intervals: Intervals) -> Intervals:
    if not intervals:
        return []
    return merge([(min(start for start, _ in intervals), max(end for _, end in intervals))])


def _span(event: Event) -> tuple[float, float]:
    return event.start, event.end


def is_nccl(name: str) -> bool:
    """Return whether a kernel is NCCL's; RCCL on AMD uses the same names."""
    return "nccl" in name or "rccl" in name


# -- the operations of a CPU ----------------------------------------------------------------------


def _computing(found: Sorted) -> Iterator[tuple[float, float]]:
    """Return the operations that neither are, nor start, nor belong to a collective."""
    names = list(found.numbers)
    starters = {number for name, number in found.numbers.items() if re.match(r"_?c10d", name)}
    gloo = {event.thread for event in found.gloo}
    for thread, calls in found.threads.items():
        if thread not in gloo:
            yield from _of_thread(calls, starters, names, found)


def _of_thread(
    calls: Calls, starters: set[int], names: list[str], found: Sorted
) -> Iterator[tuple[float, float]]:
    """Go through a thread's operations in the order in which they began, outer ones first."""
    starts, ends = calls.starts, calls.ends
    order = sorted(range(len(starts)), key=lambda i: -ends[i])
    order.sort(key=starts.__getitem__)  # what began together stays as it is: the longest first
    inside = array("d", bytes(8 * len(order)))  # what an operation's own calls took
    counts = bytearray(b"\1") * len(order)
    around: list[int] = []  # the operations within which we are
    until = float("-inf")  # a collective is being started
    for index in order:
        while around and ends[around[-1]] <= starts[index]:
            around.pop()
        if calls.names[index] in starters:
            until = max(until, ends[index])
            for outer in around:
                counts[outer] = 0
        if ends[index] <= until:
            counts[index] = 0
        if around:
            inside[around[-1]] += ends[index] - starts[index]
        around.append(index)
    for index in order:
        if counts[index]:
            yield starts[index], ends[index]
            duration = ends[index] - starts[index] - inside[index]
            found.note(names[calls.names[index]], max(0.0, duration))


def _top(found: Sorted) -> tuple[Operation, ...]:
    for event in found.nccl or found.gloo:
        found.note(event.name, event.end - event.start)
    longest = sorted(found.times.items(), key=lambda item: (-item[1][0], item[0]))[:TOP]
    return tuple(
        Operation(name[:LONGEST_NAME], time / 1e3, int(calls)) for name, (time, calls) in longest
    )


# -- communication --------------------------------------------------------------------------------


def what_travels(name: str) -> str:
    """Tell what a collective is for, by its name."""
    if re.search(r"all_?gather", name, re.IGNORECASE):
        return "parameters"
    if re.search(r"reduce_?scatter", name, re.IGNORECASE):
        return "scattered gradients"
    return "gradients" if re.search(r"all_?reduce", name, re.IGNORECASE) else "others"


def _exposed(events: Iterable[Event], computing: Intervals, window: Intervals) -> dict[str, float]:
    """Split exposed communication by what travels; what is sent at one time counts for each."""
    spans: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        spans[what_travels(event.args.get("Collective name", event.name))].append(_span(event))
    exposed = {}
    for kind, of_kind in spans.items():
        talking = intersect(merge(of_kind), window)
        exposed[kind] = (length(talking) - length(intersect(talking, computing))) / 1e3
    return exposed


def _collectives(events: Iterable[Event]) -> dict[str, Spans]:
    """List collectives: each has the same name and position on every rank of its group.

    NCCL's events name the group; gloo's do not, and all groups of a rank are one then.
    """
    spans_by_name: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in sorted(events, key=_span):
        kernel = re.match(r"[nr]ccl\w*?Kernel_([A-Za-z]+)", event.name)
        kind = kernel[1] if kernel else event.name.partition("(")[0]
        if "Collective name" in event.args:
            kind = event.args["Collective name"]
        group = event.args.get("Process Group Name")
        key = kind if group is None else f"{kind} in group {group}"
        spans_by_name[key].append((event.start / 1e3, event.end / 1e3))
    return {key: tuple(spans) for key, spans in spans_by_name.items()}
