"""Reads traces: time computing, communicating, waiting for data and idle; ranks side by side.

A trace of a GPU shows kernels: NCCL's are communication, all others compute.

A trace of a CPU (as of torch 2.13) shows collectives as `gloo:all_reduce` on gloo's own threads.
The thread that trains shows only their start, `c10d::allreduce_`; the wait that may follow is not
an event. So the computing part of an operation that starts a collective is unknown: the autograd
node that runs FSDP2's reduce-scatter lasts as long as the reduce-scatter. Such an operation does
not count; those inside it do.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from orchestrator.common import files
from orchestrator.common.errors import UsageError

Intervals = list[tuple[float, float]]
Spans = tuple[tuple[float, float], ...]  # milliseconds

KINDS = {"kernel", "cpu_op", "user_annotation"}
ARGS = ("Collective name", "Process Group Name")
# The prefix of the names by which the training loop marks its phases.
PHASE = "orchestrator: "


@dataclass(frozen=True)
class TracedRank:
    """One rank's share of all traced steps, in milliseconds.

    compute + exposed + data + idle = window, and overlapped + exposed = communication.
    """

    steps: int
    window_ms: float
    compute_ms: float
    communication_ms: float
    # Communication while something computes.
    overlapped_ms: float
    # Communication while nothing computes.
    exposed_ms: float
    # Nothing runs while the training waits for its next batch.
    data_ms: float
    idle_ms: float
    # The spans of each kind and group, in the order of their starts.
    collectives: dict[str, Spans]


class TraceEvent(NamedTuple):
    name: str
    # The field `cat` of the file.
    kind: str
    thread: Any
    start: float  # microseconds
    end: float
    args: dict[str, Any]

    @property
    def span(self) -> tuple[float, float]:
        return self.start, self.end


def read_trace(path: Path) -> tuple[int | None, TracedRank]:
    """Return the rank that a trace names, if any, and the rank's figures."""
    with open_trace(path) as trace:
        return trace.rank, trace_of_rank(events_that_matter(trace.events()))


def events_that_matter(entries: Iterable[dict[str, Any]]) -> Iterator[TraceEvent]:
    """Yield the events of a trace that the figures need."""
    for entry in entries:
        if entry["ph"] == "X" and entry.get("cat") in KINDS:
            start = number(entry["ts"])
            end = start + number(entry.get("dur", 0))
            known = entry.get("args") or {}
            args = {name: known[name] for name in ARGS if name in known}
            name = sys.intern(entry["name"])
            yield TraceEvent(name, entry["cat"], entry.get("tid"), start, end, args)


def trace_of_rank(events: Iterable[TraceEvent]) -> TracedRank:
    found: defaultdict[str, list[TraceEvent]] = defaultdict(list)
    for event in events:
        found[sort_of(event)].append(event)
    on_device = bool(found["kernel"] or found["nccl"])
    communication = found["nccl"] if on_device else found["gloo"]
    talking = merge_intervals(event.span for event in communication)
    if on_device:
        # The host's steps are no measure: kernels run later than the steps that launched them.
        compute = merge_intervals(event.span for event in found["kernel"])
        whole: Intervals = []
    else:
        compute = computing(found["cpu"], {event.thread for event in found["gloo"]})
        whole = merge_intervals(event.span for event in found["step"])
    ends = whole or [*talking[:1], *talking[-1:], *compute[:1], *compute[-1:]]
    window = [(min(start for start, _ in ends), max(end for _, end in ends))] if ends else []
    compute, talking = intersect_intervals(compute, window), intersect_intervals(talking, window)
    busy = merge_intervals([*compute, *talking])
    waiting = intersect_intervals(merge_intervals(event.span for event in found["data"]), window)
    both = total_length(intersect_intervals(compute, talking))
    data = total_length(waiting) - total_length(intersect_intervals(waiting, busy))
    return TracedRank(
        steps=max(len({event.name for event in found["step"]}), 1),
        window_ms=total_length(window) / 1e3,
        compute_ms=total_length(compute) / 1e3,
        communication_ms=total_length(talking) / 1e3,
        overlapped_ms=both / 1e3,
        exposed_ms=(total_length(talking) - both) / 1e3,
        data_ms=data / 1e3,
        idle_ms=(total_length(window) - total_length(busy) - data) / 1e3,
        collectives=collectives_of(communication),
    )


def sort_of(event: TraceEvent) -> str:
    """Return the sort of an event; RCCL on AMD uses the names of NCCL's kernels."""
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


def computing(calls: Iterable[TraceEvent], gloo: set[Any]) -> Intervals:
    """Return when a CPU ran operations that neither are, nor start, nor belong to a collective."""
    threads: defaultdict[Any, list[TraceEvent]] = defaultdict(list)
    for call in calls:
        if call.thread not in gloo:
            threads[call.thread].append(call)
    return merge_intervals(
        span for of_thread in threads.values() for span in computing_calls(of_thread)
    )


def computing_calls(calls: list[TraceEvent]) -> Iterator[tuple[float, float]]:
    """Yield the spans of a thread's operations that compute and start no collective."""
    calls.sort(key=lambda call: (call.start, -call.end))
    counts = [True] * len(calls)
    # The indices of the operations that enclose the current one.
    around: list[int] = []
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


def collectives_of(events: Iterable[TraceEvent]) -> dict[str, Spans]:
    """Return the collectives: each has the same name and position on every rank of its group.

    NCCL's events name the group; gloo's do not, so all groups of a rank are one then.
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


def merge_intervals(intervals: Iterable[tuple[float, float]]) -> Intervals:
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif start < end:
            merged.append((start, end))
    return merged


def intersect_intervals(first: Intervals, other: Intervals) -> Intervals:
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


def total_length(merged: Intervals) -> float:
    return sum(end - start for start, end in merged)


# -- Chrome's files ---------------------------------------------------------------------------


PIECE_BYTES = 1 << 20
# The limit of one event, and of the header before the events.
LARGEST_CHARACTERS = 1 << 24
# The limit of a whole trace, as a small compressed file may unpack to any size.
MOST_BYTES = 1 << 33
MOST_RANKS = 1 << 20
# The Unix clock in the year 2286.
LATEST_NANOSECONDS = 1e19
GZIP_MAGIC = b"\x1f\x8b"
# Exceptions of json, gzip and the reading of an event for a damaged file.
DAMAGED = (
    gzip.BadGzipFile,
    ValueError,
    OverflowError,
    KeyError,
    TypeError,
    EOFError,
    zlib.error,
    RecursionError,
)
BETWEEN = re.compile(r"[\s,]*")
LIST = re.compile(r'"traceEvents"\s*:\s*\[')


class Trace:
    """An open trace: its header, and its events, which can be read once."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.text, self.at, self.count = "", 0, 0
        while (found := LIST.search(self.text)) is None:
            if len(self.text) > LARGEST_CHARACTERS or not self._more():
                raise KeyError("no list of traceEvents")
        before = self.text[: found.start()].rstrip().rstrip(",")
        self.at = found.end()
        header: dict[str, Any] = json.loads(before + "}")
        # The Trainer's own header: the rank, its node, the steps.
        self.about = dict_of(header.get("orchestrator"))
        rank = self.about.get("rank", dict_of(header.get("distributedInfo")).get("rank"))
        self.rank = rank if isinstance(rank, int) and 0 <= rank < MOST_RANKS else None

    def events(self) -> Iterator[dict[str, Any]]:
        decode = json.JSONDecoder().raw_decode
        while True:
            self.at = cast("re.Match[str]", BETWEEN.match(self.text, self.at)).end()
            if self.text.startswith("]", self.at):
                return
            try:
                event, self.at = decode(self.text, self.at)
            except ValueError:
                # The event continues in the next piece.
                if len(self.text) - self.at > LARGEST_CHARACTERS or not self._more():
                    raise
                continue
            if not isinstance(event, dict):
                raise TypeError("an event is not an object")
            yield event

    def _more(self) -> bool:
        data = self.file.read(PIECE_BYTES)
        self.count += len(data)
        if self.count > MOST_BYTES:
            raise ValueError(f"it unfolds to more than {MOST_BYTES >> 30} GB")
        self.text, self.at = self.text[self.at :] + self.decode(data, not data), 0
        return bool(data)


def number(value: Any) -> float:
    """Return a time of a trace; raise ValueError for NaN, infinity and impossible years."""
    taken = float(value)
    # Written so that NaN is rejected.
    if not abs(taken) < LATEST_NANOSECONDS:
        raise ValueError(f"a time of {taken}")
    return taken


def dict_of(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


@contextmanager
def open_trace(path: Path) -> Iterator[Trace]:
    """Open a trace, compressed or not; a damaged one raises UsageError, also while it is read."""
    try:
        file = files.open_plain(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    with file:
        try:
            packed = file.read(2) == GZIP_MAGIC
            file.seek(0)
            plain = gzip.GzipFile(fileobj=file) if packed else file
            yield Trace(cast("IO[bytes]", plain))
        except DAMAGED as bad:
            raise UsageError(f"{path} is not a Chrome trace: {bad}") from bad


# -- what overlaps ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Overlap:
    """All ranks, compared.

    A collective lasts from the arrival of a rank to its end, so it includes the wait for the last
    rank. That one is the slow one and waits least.
    """

    ranks: dict[int, TracedRank]
    # Per step: the time in collectives beyond that of the fastest rank.
    waited_ms: dict[int, float]
    # The rank that waits least, if the others wait noticeably longer.
    straggler: int | None
    # Per step: how much longer the others wait, on average.
    lag_ms: float
    # Collectives that are not compared, as their number differs between ranks.
    unmatched: tuple[str, ...] = ()

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


# A smaller part of a step is noise.
NOTICEABLE = 0.02


def compare_ranks(ranks: Mapping[int, TracedRank]) -> Overlap:
    waits: dict[int, Intervals] = {number: [] for number in ranks}
    unmatched = []
    for kind in sorted({kind for rank in ranks.values() for kind in rank.collectives}):
        spans = {n: rank.collectives[kind] for n, rank in ranks.items() if kind in rank.collectives}
        if len({len(events) for events in spans.values()}) > 1:
            unmatched.append(kind)
            continue
        for same in zip(*spans.values(), strict=True):
            fastest = min(end - start for start, end in same)
            for number, (start, end) in zip(spans, same, strict=True):
                waits[number].append((start, end - fastest))
    # DDP has several collectives under way at a time: their common wait must count once.
    waited = {
        n: total_length(merge_intervals(events)) / ranks[n].steps for n, events in waits.items()
    }
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


# -- in words -------------------------------------------------------------------------------------

# The heading of each part of a step, and its field in TracedRank.
COLUMNS = {
    "step": "window_ms",
    "computing": "compute_ms",
    "exposed comm": "exposed_ms",
    "data": "data_ms",
    "idle": "idle_ms",
}
MOST_LINES = 16


def overlap_to_text(overlap: Overlap, hosts: Mapping[int, str] | None = None) -> str:
    """Return a table in milliseconds per step, followed by its interpretation."""
    numbers = list(overlap.ranks)
    if len(numbers) > MOST_LINES:
        # Keep the ranks that the others wait for.
        numbers = sorted(sorted(numbers, key=lambda number: overlap.waited_ms[number])[:MOST_LINES])
    headings = (*COLUMNS, "waited")
    lines = ["rank  " + "  ".join(f"{name:>9}" for name in headings) + "  ms per step"]
    for number in numbers:
        rank = overlap.ranks[number]
        cells = [getattr(rank, name) / rank.steps for name in COLUMNS.values()]
        row = zip(headings, [*cells, overlap.waited_ms[number]], strict=True)
        line = f"{number:>4}  " + "  ".join(f"{cell:>{max(9, len(n))}.1f}" for n, cell in row)
        words = [(hosts or {}).get(number, ""), "slowest" * (number == overlap.straggler)]
        lines.append("  ".join([line, *filter(None, words)]))
    if len(overlap.ranks) > MOST_LINES:
        lines.append(f"      ... and {len(overlap.ranks) - MOST_LINES} more, which waited longer")
    return "\n".join([*lines, describe_overlap(overlap)])


def describe_overlap(overlap: Overlap) -> str:
    """Return one sentence: how much communication there is, and whether a rank is slow."""
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


def overlap_as_data(overlap: Overlap) -> dict[str, Any]:
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
        "reading": describe_overlap(overlap),
        "ranks": ranks,
    }
