"""Find in Chrome traces how much communication computation hides, and which rank is slow.

Used at the end of a profile, and by hand on the traces of any torch.profiler:
`python -m orchestrator.engine.observe.overlap outputs/profile/rank_*.json.gz`.

A trace of a GPU shows kernels: NCCL's are communication, all others compute. A trace of a CPU (as
torch 2.13 writes it) shows collectives as `gloo:all_reduce` on gloo's own threads, and on the
thread that trains only their start, `c10d::allreduce_`; the wait that may follow is not an event.
What an operation does that starts a collective is therefore unknown (the node of the autograd graph
that FSDP2 hangs its reduce-scatter on lasts as long as the reduce-scatter): it does not count, the
operations inside it do.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.errors import UsageError

# -- intervals: (start, end), sorted and without overlaps once they are merged ---------------------

Intervals = list[tuple[float, float]]


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


# -- what the trace of one rank says --------------------------------------------------------------

Spans = tuple[tuple[float, float], ...]  # milliseconds since anything


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


class Event(NamedTuple):
    name: str
    kind: str  # `cat` in the file
    thread: Any
    start: float  # microseconds
    end: float
    args: dict[str, Any]


KINDS = {"kernel", "gpu_memcpy", "gpu_memset", "cpu_op", "user_annotation"}
ARGS = ("Collective name", "Process Group Name", "rank")


def read(path: Path) -> tuple[list[Event], int | None]:
    """Return the events that matter, and the rank that the file names.

    All others are dropped while the file is parsed: a tenth of the memory of the whole.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = json.load(file, object_hook=_what_matters)
        events = [event for event in data["traceEvents"] if isinstance(event, Event)]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise UsageError(f"{path} is not a Chrome trace: {error}") from error
    return events, data.get("distributedInfo", {}).get("rank")


def _what_matters(entry: dict[str, Any]) -> Any:
    if "traceEvents" in entry:
        return entry
    if "ph" not in entry:  # the arguments of an event, or of the file
        return {name: entry[name] for name in ARGS if name in entry}
    if entry["ph"] != "X" or entry.get("cat") not in KINDS:
        return None
    start = float(entry["ts"])
    end = start + float(entry.get("dur", 0))
    name, args = sys.intern(entry["name"]), entry.get("args", {})
    return Event(name, entry["cat"], entry.get("tid"), start, end, args)


def of_rank(events: Sequence[Event]) -> Rank:
    steps = merge(_span(e) for e in events if e.name.startswith("ProfilerStep#"))
    count = len({e.name for e in events if e.name.startswith("ProfilerStep#")})
    if any(event.kind == "kernel" for event in events):
        communication = [e for e in events if e.kind == "kernel" and _is_nccl(e.name)]
        compute = [_span(e) for e in events if e.kind == "kernel" and not _is_nccl(e.name)]
        copies = [_span(e) for e in events if e.kind in ("gpu_memcpy", "gpu_memset")]
        # Kernels run later than the steps of the host that launched them.
        steps = []
    else:
        communication = [e for e in events if e.name.startswith("gloo:")]
        compute = list(_computing(events, {e.thread for e in communication}))
        copies = []
    spans = [_span(e) for e in communication]
    whole = steps or merge([*spans, *compute, *copies])
    window: Intervals = [(whole[0][0], whole[-1][1])] if whole else []
    computing = intersect(merge(compute), window)
    talking = intersect(merge(spans), window)
    both = length(intersect(computing, talking))
    working = merge([*computing, *talking])
    busy = length(intersect(merge([*working, *copies]), window))
    return Rank(
        steps=max(count, 1),
        window_ms=length(window) / 1e3,
        compute_ms=length(computing) / 1e3,
        communication_ms=length(talking) / 1e3,
        overlapped_ms=both / 1e3,
        exposed_ms=(length(talking) - both) / 1e3,
        copying_ms=(busy - length(working)) / 1e3,
        idle_ms=(length(window) - busy) / 1e3,
        collectives=_collectives(communication),
    )


def _span(event: Event) -> tuple[float, float]:
    return event.start, event.end


def _is_nccl(name: str) -> bool:
    """Return whether a kernel is NCCL's; RCCL on AMD uses the same names."""
    return "nccl" in name or "rccl" in name


def _computing(events: Sequence[Event], gloo: set[Any]) -> Iterable[tuple[float, float]]:
    """Return the operations that neither are, nor start, nor belong to a collective."""
    threads: defaultdict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind == "cpu_op" and event.thread not in gloo:
            threads[event.thread].append(event)
    for own in threads.values():
        own.sort(key=lambda event: (event.start, -event.end))
        around: list[int] = []  # the operations within which we are
        counts = [True] * len(own)
        collective_until = float("-inf")
        for index, event in enumerate(own):
            while around and own[around[-1]].end <= event.start:
                around.pop()
            if re.match(r"_?c10d", event.name):
                collective_until = max(collective_until, event.end)
                for outer in around:
                    counts[outer] = False
            if event.end <= collective_until:
                counts[index] = False
            around.append(index)
        yield from (_span(e) for e, right in zip(own, counts, strict=True) if right)


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


# -- all ranks together ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Overlap:
    """All ranks. A collective lasts from the arrival of a rank to its end, so it contains the wait
    for the last one to arrive, who is the slow one and waits least."""

    ranks: dict[int, Rank]
    waited_ms: dict[int, float]  # per step: in collectives that took a faster rank less time
    straggler: int | None  # the rank that waits least, if the others wait noticeably longer
    lag_ms: float  # per step: how much longer, on average
    unmatched: tuple[str, ...] = ()  # collectives that ranks saw unequal numbers of: left out

    @property
    def communication(self) -> float:
        """Communication as a part of the time, over all ranks."""
        return self._sum("communication_ms") / (self._sum("window_ms") or 1)

    @property
    def hidden(self) -> float:
        """Hidden communication as a part of all communication, over all ranks."""
        return self._sum("overlapped_ms") / (self._sum("communication_ms") or 1)

    def _sum(self, name: str) -> float:
        total: float = sum(getattr(rank, name) for rank in self.ranks.values())
        return total


NOTICEABLE = 0.02  # of a step; less is noise


def compare(ranks: Mapping[int, Rank]) -> Overlap:
    waits: dict[int, Intervals] = {number: [] for number in ranks}
    unmatched = []
    for kind in sorted({kind for rank in ranks.values() for kind in rank.collectives}):
        spans = {n: rank.collectives[kind] for n, rank in ranks.items() if kind in rank.collectives}
        if len({len(own) for own in spans.values()}) > 1:
            unmatched.append(kind)
            continue
        for same in zip(*spans.values(), strict=True):
            fastest = min(end - start for start, end in same)
            for number, (start, end) in zip(spans, same, strict=True):
                waits[number].append((start, end - fastest))
    # DDP has several under way at a time: what they wait together is not to be counted twice.
    waited = {n: length(merge(own)) / ranks[n].steps for n, own in waits.items()}
    straggler, lag = None, 0.0
    if len(ranks) > 1:
        least = min(waited, key=lambda number: waited[number])
        others = [time for number, time in waited.items() if number != least]
        lag = sum(others) / len(others) - waited[least]
        step = ranks[least].window_ms / ranks[least].steps
        # Ranks that wait for each other in turn (two on one busy machine: 19.8 and 12.9 ms of a
        # step of 136) are equally slow.
        straggler = least if lag > max(NOTICEABLE * step, waited[least]) else None
    return Overlap(dict(sorted(ranks.items())), waited, straggler, lag, tuple(unmatched))


def summary(paths: Mapping[int, Path]) -> Overlap:
    """Summarize one trace per rank."""
    return compare({number: of_rank(read(path)[0]) for number, path in paths.items()})


# -- told -----------------------------------------------------------------------------------------

COLUMNS = {
    "step": "window_ms",
    "compute": "compute_ms",
    "communication": "communication_ms",
    "overlapped": "overlapped_ms",
    "exposed": "exposed_ms",
    "copies": "copying_ms",
    "idle": "idle_ms",
}
MOST = 16  # lines of the table


def to_text(overlap: Overlap) -> str:
    """Format a table in milliseconds per step, and what it means."""
    numbers = list(overlap.ranks)
    if len(numbers) > MOST:  # those that the others wait for
        numbers = sorted(sorted(numbers, key=lambda number: overlap.waited_ms[number])[:MOST])
    lines = ["rank  " + "  ".join(f"{name:>9}" for name in (*COLUMNS, "waited")) + "  ms per step"]
    for number in numbers:
        rank = overlap.ranks[number]
        cells = [getattr(rank, name) / rank.steps for name in COLUMNS.values()]
        cells.append(overlap.waited_ms[number])
        row = zip((*COLUMNS, "waited"), cells, strict=True)
        line = f"{number:>4}  " + "  ".join(f"{cell:>{max(9, len(n))}.1f}" for n, cell in row)
        lines.append(line + ("  slowest" if number == overlap.straggler else ""))
    if len(overlap.ranks) > MOST:
        lines.append(f"      ... and {len(overlap.ranks) - MOST} more, which waited longer")
    return "\n".join([*lines, reading(overlap)])


def reading(overlap: Overlap) -> str:
    if not overlap.communication:
        return "no communication was seen"
    sentence = (
        f"communication is {overlap.communication:.0%} of the time"
        f" and {overlap.hidden:.0%} of it is hidden"
    )
    if overlap.straggler is not None:
        sentence += (
            f"; rank {overlap.straggler} is slowest:"
            f" others wait {overlap.lag_ms:.3g} ms per step for it"
        )
    elif len(overlap.ranks) > 1:
        sentence += "; no rank is slower than the others"
    if overlap.unmatched:
        sentence += f" (not compared: {', '.join(overlap.unmatched)})"
    return sentence


def as_data(overlap: Overlap) -> dict[str, Any]:
    """Return the result for JSON."""
    ranks = {}
    for number, rank in overlap.ranks.items():
        data = asdict(rank)
        del data["collectives"]
        ranks[str(number)] = {**data, "waited_ms_per_step": overlap.waited_ms[number]}
    return {
        "communication": overlap.communication,
        "hidden": overlap.hidden,
        "straggler": overlap.straggler,
        "lag_ms_per_step": overlap.lag_ms,
        "not_compared": list(overlap.unmatched),
        "reading": reading(overlap),
        "ranks": ranks,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator.engine.observe.overlap",
        description="Read the traces of all ranks.",
    )
    parser.add_argument("trace", type=Path, nargs="+", help="one per rank: .json or .json.gz")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args()
    ranks: dict[int, Rank] = {}
    try:
        for index, path in enumerate(options.trace):
            events, number = read(path)
            named = re.search(r"rank_?(\d+)", path.name)
            number = number if number is not None else int(named[1]) if named else index
            if number in ranks:
                raise UsageError(f"{path} is a second trace of rank {number}")
            ranks[number] = of_rank(events)
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    overlap = compare(ranks)
    sys.stdout.write((json.dumps(as_data(overlap)) if options.json else to_text(overlap)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
