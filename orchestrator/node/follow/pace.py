"""Finds out when each rank of this node entered the collectives of its last steps.

torch's flight recorder has that for any program; its steps are where the same collectives come
again. Which rank the others wait for is decided by the head, which hears this of all nodes.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from orchestrator.node.job import hang
from orchestrator.node.job.run_directory import RunDir
from orchestrator.protocol.requests.follow import Pace

GROUP = "0"  # torch's name of the group of all ranks
# A collective on a GPU is entered by the program long before the GPU comes to it.
BACKEND = "gloo:"
LEAST_STEPS = 10
LEAST_SAMPLE = 20  # steps that are told of, where there are as many
LONGEST_STEP = 200  # collectives
UNEVEN = 0.3  # of the usual time: so much the time between equal collectives may vary
GPUS = ("/dev/nvidiactl", "/dev/kfd")


class Entry(NamedTuple):
    """One collective, as a rank's recorder has it."""

    number: int
    time: float  # when the rank entered it, Unix
    kind: str  # its name and sizes


def ask(run: RunDir) -> dict[int, Pace]:
    """Have all ranks write down what they remember, and wait for none; there are no answers yet.

    That takes a rank 0.1 s at most.
    """
    if not any(map(os.path.exists, GPUS)):
        first = run.read_spec().first_rank
        for rank in hang.rank_pids(run).values():
            with contextlib.suppress(OSError):
                os.unlink(hang.collectives(run, rank - first))
            hang.knock(hang.file_of(run, "ask", rank - first))
    return {}


def read(run: RunDir) -> dict[int, Pace]:
    """Return the pace of each rank that has written and makes steps."""
    first = run.read_spec().first_rank
    paces = {}
    for pid, rank in hang.rank_pids(run).items():
        path = hang.collectives(run, rank - first)
        with contextlib.suppress(OSError):
            pace = pace_of(hang.read(path, 0, hang.LONGEST_DUMP))
            os.unlink(path)
            if pace is not None:
                paces[rank] = pace.replace(**scheduled(pid), at=os.times().elapsed)
    return paces


def scheduled(pid: int) -> dict[str, float]:
    """Return for how long the main thread ran or wanted to, and wanted to in vain, if known."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
            ran, waited = (int(word) / 1e9 for word in file.read().split()[:2])
        return {"awake": ran + waited, "denied": waited}
    except (OSError, ValueError):
        return {}


def pace_of(dumps: str) -> Pace | None:
    """Return when the rank entered some collectives of each of its last steps, if it has steps."""
    try:
        entries = of_all_ranks(hang.entries_of(dumps))
    except (ValueError, LookupError, TypeError, AttributeError):
        return None  # a torch that writes it differently
    found = step(entries)
    if found is None:
        return None
    length, steps = found
    looked_at = {length * part // 4 for part in range(4)} | {length - 1}
    # Some steps of all that are remembered, and the same ones of every rank, or every other one.
    stride = 1
    while steps >= 2 * stride * LEAST_SAMPLE:
        stride *= 2
    chosen = (
        entry
        for entry in entries[-steps * length :]
        if entry.number // length % stride == 0 and entry.number % length in looked_at
    )
    return Pace(length=length, times={entry.number: entry.time for entry in chosen})


def of_all_ranks(recorded: list[dict[str, Any]]) -> list[Entry]:
    """Return the collectives of all ranks together, the last ones without a gap."""
    entries: list[Entry] = []
    for entry in recorded:
        name = entry["profiling_name"]
        if entry["is_p2p"] or entry["process_group"][0] != GROUP or not name.startswith(BACKEND):
            continue
        number = int(entry["collective_seq_id"])
        if entries and number != entries[-1].number + 1:
            entries.clear()
        kind = f"{name} {entry['input_sizes']}"
        entries.append(Entry(number, entry["time_created_ns"] / 1e9, kind))
    return entries


def step(entries: Sequence[Entry]) -> tuple[int, int] | None:
    """Return how many collectives a step has, and how many steps of this kind were the last."""
    count = len(entries)
    for length in range(1, min(LONGEST_STEP, count // LEAST_STEPS) + 1):
        pairs = zip(reversed(entries), reversed(entries[:-length]))  # noqa: B905  Python 3.9
        equal = next((n for n, (one, other) in enumerate(pairs) if one.kind != other.kind), None)
        steps = (count - length if equal is None else equal) // length + 1
        if steps >= LEAST_STEPS and is_even([e.time for e in entries[-steps * length :: length]]):
            return length, steps
    return None


def is_even(times: Sequence[float]) -> bool:
    """Return True if they are equally far apart: parts of one step, which may look alike, are not.

    A pause comes after the last one, of a third of the step at least: the next forward pass.
    """
    gaps = [times[i + 1] - times[i] for i in range(len(times) - 1)]
    middle = statistics.median(gaps)
    off = statistics.median([abs(gap - middle) for gap in gaps])
    return max(off, statistics.fmean(gaps) - middle) <= UNEVEN * middle
