"""The collectives that `orchestrator verify` runs: inputs, expected results, time.

Every element of every result is compared. Values are small whole numbers that float32 adds up
exactly. They differ between ranks and between neighbours, so a missing, doubled or misplaced block
shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.common import text
from orchestrator.engine.verify.world import World, free_bytes

# A prime: no block of a power of two looks like the next.
PERIOD = 61
WEIGHTS = 31
SMALLEST_BYTES = 1 << 10
# The factor from one size to the next.
GROWTH = 4
MOST_RUNS = 50
# A twentieth of a collective's time goes into the timed runs of one size.
RUNS_PART = 20
# Copies of the largest size that may exist at once: input, output, expected, the backend's own.
COPIES = 6
# Why sizes end before --max-size.
TIME, MEMORY = "time", "memory"

Mistake = tuple[int, float, float]


@dataclass(frozen=True)
class Call:
    """A collective on tensors of one size, and the factors of the pattern in its result."""

    run: Callable[[], Any]
    result: Tensor
    factors: Sequence[int]  # of equal pieces
    start: int = 0  # the place of each piece in the pattern


def all_reduce(world: World, count: int) -> Call:
    data = pattern(world, count, factor(world.rank))
    return Call(lambda: dist.all_reduce(data), data, [total(world)])


def all_gather(world: World, count: int) -> Call:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    own = pattern(world, count // world.size, factor(world.rank))
    result = torch.zeros(count, device=world.device)
    return Call(lambda: gather(result, own), result, [factor(rank) for rank in range(world.size)])


def reduce_scatter(world: World, count: int) -> Call:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    own, part = pattern(world, count, factor(world.rank)), count // world.size
    result = torch.zeros(part, device=world.device)
    return Call(lambda: scatter(result, own), result, [total(world)], world.rank * part)


# By each name: the call for a number of elements, and the bytes on the busiest link for one byte of
# the larger side, as nccl-tests defines them (doc/PERFORMANCE.md there).
COLLECTIVES: dict[str, tuple[Callable[[World, int], Call], Callable[[int], float]]] = {
    "all_reduce": (all_reduce, lambda n: 2 * (n - 1) / n),
    "all_gather": (all_gather, lambda n: (n - 1) / n),
    "reduce_scatter": (reduce_scatter, lambda n: (n - 1) / n),
}


# -- values ---------------------------------------------------------------------------------------


def factor(rank: int) -> int:
    return rank % WEIGHTS + 1


def total(world: World) -> int:
    return sum(map(factor, range(world.size)))


def pattern(world: World, count: int, times: int, start: int = 0) -> Tensor:
    """Return 1 to PERIOD again and again, times a factor."""
    return ((torch.arange(count, device=world.device) + start) % PERIOD + 1).float() * times


def first_wrong(world: World, call: Call) -> Mistake | None:
    """Return (element, its value, the right value), or None if all are right."""
    length = call.result.numel() // len(call.factors)
    for index, times in enumerate(call.factors):
        piece = call.result[index * length : (index + 1) * length]
        expected = pattern(world, length, times, call.start)
        if not torch.equal(piece, expected):
            at = int((piece != expected).nonzero()[0])
            return index * length + at, float(piece[at]), float(expected[at])
    return None


# -- measuring ------------------------------------------------------------------------------------


@dataclass
class Results:
    """The results of all collectives so far, on this rank."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def measure(world: World, largest: int, seconds: float) -> Results:
    """Run every collective at every size that the time and the memory allow."""
    results = Results()
    deadline = time.monotonic() + seconds
    for index, name in enumerate(COLLECTIVES):
        left = world.most(max(0.0, deadline - time.monotonic()))
        began = len(results.rows)
        reason = grow(world, name, largest, left / (len(COLLECTIVES) - index), results)
        world.say(line(name, results.rows[began:]))
        if reason and reason not in results.notes:
            results.notes.append(reason)
    return results


def grow(world: World, name: str, largest: int, share: float, results: Results) -> str:
    """Measure sizes from 1 KB to `largest`; return what ended it early, time or memory.

    All ranks stop at the same size, because they decide by figures that all have agreed on.
    """
    COLLECTIVES[name][0](world, world.size).run()  # The first call connects.
    spent, last, size = 0.0, 0.0, SMALLEST_BYTES
    while size <= largest:
        if spent and spent + GROWTH * last + share / RUNS_PART > share:
            return TIME
        if -world.most(-float(free_bytes(world))) < COPIES * size:
            return MEMORY
        began = time.monotonic()
        last = measure_size(world, name, size, share / RUNS_PART, results)
        spent += world.most(time.monotonic() - began)
        size *= GROWTH
    return ""


def measure_size(world: World, name: str, size: int, budget: float, results: Results) -> float:
    """Run one size, compare every element and time it; return the seconds without repetitions."""
    began = time.monotonic()
    make, busbw = COLLECTIVES[name]
    count = max(world.size, size // 4 // world.size * world.size)
    row = {"collective": name, "bytes": 4 * count}
    call = make(world, count)
    call.run()
    world.settle()
    if mistake := first_wrong(world, call):
        found = dict(zip(("element", "got", "expected"), mistake, strict=True))
        results.wrong.append({**row, "rank": world.rank, **found})
    call.result.zero_()  # Sums of sums of sums would end in infinity.
    each = world.most(world.seconds(call.run))
    alone = world.most(time.monotonic() - began)
    runs = max(1, min(MOST_RUNS, int(budget / max(each, 1e-9))))
    each = world.most(world.seconds(call.run, runs))
    rate = 4 * count * busbw(world.size) / each
    results.rows.append({**row, "ranks": world.size, "seconds": each, "busbw": rate, "runs": runs})
    return alone


def line(name: str, rows: list[dict[str, Any]]) -> str:
    """Format rank 0's line about a collective that is done."""
    if not rows:
        return f"{name}: no memory for any size"
    best = max(rows, key=lambda row: float(row["busbw"]))
    least, at, most = (text.size(row["bytes"], binary=True) for row in (rows[0], best, rows[-1]))
    first = f"{least} in {1e6 * rows[0]['seconds']:,.0f} us"
    return f"{name}: {first}, best {8e-9 * best['busbw']:.3g} Gb/s at {at}, up to {most}"
