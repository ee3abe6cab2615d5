"""The collectives that `orchestrator verify` runs: inputs, expected results, time.

Every element of every result is compared. Values are small whole numbers that float32 adds up
exactly. They differ between ranks and between neighbours, so a missing, doubled or misplaced block
shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.common import text
from orchestrator.engine.verify.world import World, free_bytes

# A prime: no block of a power of two looks like the next.
PERIOD = 61
# A million elements are compared at a time.
ELEMENTS_AT_ONCE = PERIOD << 14
WEIGHTS = 31
SMALLEST_BYTES = 1 << 10
# The factor from one size to the next.
GROWTH = 4
MOST_RUNS = 50
# A twentieth of a collective's time goes into the timed runs of one size.
RUNS_PART = 20
# Copies of the largest size that may exist at once: input, output, and the backend's own.
COPIES = 4
# Why sizes end before --max-size.
TIME, MEMORY = "time", "memory"
IN_PLACE = ("all_reduce", "broadcast")

Mistake = tuple[int, float, float]


@dataclass(frozen=True)
class Collective:
    """`run(into, out_of, world)`; sizes are those of nccl-tests: bytes of the larger side."""

    name: str
    run: Callable[[Tensor, Tensor, World], None]
    # (elements, ranks) -> elements of the input, and of the output.
    ins: Callable[[int, int], int]
    outs: Callable[[int, int], int]
    # Bytes on the busiest link / size, by the number of ranks, as nccl-tests defines it
    # (doc/PERFORMANCE.md there): the figure to compare with a link.
    busbw: Callable[[int], float]
    # The output in equal pieces: the factor, and the first element of the pattern, of each.
    expected: Callable[[World, int], list[tuple[int, int]]]


def all_reduce(into: Tensor, out_of: Tensor, world: World) -> None:
    dist.all_reduce(into)


def all_gather(into: Tensor, out_of: Tensor, world: World) -> None:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(into, out_of)


def reduce_scatter(into: Tensor, out_of: Tensor, world: World) -> None:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(into, out_of)


def broadcast(into: Tensor, out_of: Tensor, world: World) -> None:
    dist.broadcast(into, 0)


def send_recv(into: Tensor, out_of: Tensor, world: World) -> None:
    """Send from each rank to the next, in a ring."""
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    ops = [dist.P2POp(dist.isend, out_of, after), dist.P2POp(dist.irecv, into, before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def whole(count: int, ranks: int) -> int:
    return count


def part(count: int, ranks: int) -> int:
    return count // ranks


def nothing(count: int, ranks: int) -> int:
    return 0


def total(world: World) -> int:
    return sum(map(weight, range(world.size)))


COLLECTIVES = (
    Collective(
        "all_reduce",
        all_reduce,
        nothing,
        whole,
        lambda n: 2 * (n - 1) / n,
        lambda world, count: [(total(world), 0)],
    ),
    Collective(
        "all_gather",
        all_gather,
        part,
        whole,
        lambda n: (n - 1) / n,
        lambda world, count: [(weight(rank), 0) for rank in range(world.size)],
    ),
    Collective(
        "reduce_scatter",
        reduce_scatter,
        whole,
        part,
        lambda n: (n - 1) / n,
        lambda world, count: [(total(world), world.rank * count)],
    ),
    Collective(
        "broadcast",
        broadcast,
        nothing,
        whole,
        lambda n: 1.0,
        lambda world, count: [(weight(0), 0)],
    ),
    Collective(
        "send_recv",
        send_recv,
        whole,
        whole,
        lambda n: 1.0,
        lambda world, count: [(weight((world.rank - 1) % world.size), 0)],
    ),
)


# -- values ---------------------------------------------------------------------------------------


def weight(rank: int) -> int:
    return rank % WEIGHTS + 1


def patterned(tensor: Tensor, factor: int, start: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (first element, piece, expected values) for each piece of a tensor.

    The pattern of the whole tensor begins with its element `start`.
    """
    count = min(ELEMENTS_AT_ONCE, tensor.numel())
    ramp = (torch.arange(count, device=tensor.device) + start) % PERIOD + 1
    pattern = ramp.float() * factor
    for first in range(0, tensor.numel(), ELEMENTS_AT_ONCE):
        piece = tensor[first : first + ELEMENTS_AT_ONCE]
        yield first, piece, pattern[: piece.numel()]


def fill(tensor: Tensor, factor: int, start: int = 0) -> None:
    for _, piece, pattern in patterned(tensor, factor, start):
        piece.copy_(pattern)


def first_wrong(tensor: Tensor, factor: int, start: int = 0) -> Mistake | None:
    """Return (element, its value, the right value), or None if all are right."""
    for first, piece, expected in patterned(tensor, factor, start):
        if not torch.equal(piece, expected):
            at = int((piece != expected).nonzero()[0])
            return first + at, float(piece[at]), float(expected[at])
    return None


def prepare(collective: Collective, world: World, count: int) -> tuple[Tensor, Tensor]:
    """Return the output, which is also the input of a collective in place, and the input."""
    into = torch.zeros(collective.outs(count, world.size), device=world.device)
    out_of = torch.empty(collective.ins(count, world.size), device=world.device)
    if collective.name not in IN_PLACE:
        fill(out_of, weight(world.rank))
    elif collective.name == "all_reduce" or world.rank == 0:
        fill(into, weight(world.rank))
    return into, out_of


def check(collective: Collective, world: World, into: Tensor) -> Mistake | None:
    pieces = collective.expected(world, into.numel())
    length = into.numel() // len(pieces)
    for index, (factor, start) in enumerate(pieces):
        mistake = first_wrong(into[index * length : (index + 1) * length], factor, start)
        if mistake is not None:
            return index * length + mistake[0], mistake[1], mistake[2]
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
    for index, collective in enumerate(COLLECTIVES):
        left = world.most(max(0.0, deadline - time.monotonic()))
        began = len(results.rows)
        reason = grow(world, collective, largest, left / (len(COLLECTIVES) - index), results)
        world.say(line(collective, results.rows[began:]))
        if reason and reason not in results.notes:
            results.notes.append(reason)
    results.rows.append(barrier(world))
    return results


def grow(world: World, collective: Collective, largest: int, share: float, results: Results) -> str:
    """Measure sizes from 1 KB to `largest`; return what ended it early, time or memory.

    All ranks stop at the same size, because they decide by figures that all have agreed on.
    """
    into, out_of = prepare(collective, world, world.size)
    collective.run(into, out_of, world)  # The first call connects.
    spent, last, size = 0.0, 0.0, SMALLEST_BYTES
    while size <= largest:
        if spent and spent + GROWTH * last + share / RUNS_PART > share:
            return TIME
        if -world.most(-float(free_bytes(world))) < COPIES * size:
            return MEMORY
        began = time.monotonic()
        last = once(world, collective, size, share / RUNS_PART, results)
        spent += world.most(time.monotonic() - began)
        size *= GROWTH
    return ""


def once(world: World, collective: Collective, size: int, budget: float, results: Results) -> float:
    """Run one size, compare every element and time it; return the seconds without repetitions."""
    began = time.monotonic()
    count = max(world.size, size // 4 // world.size * world.size)
    row = {"collective": collective.name, "ranks": world.size, "bytes": 4 * count}
    into, out_of = prepare(collective, world, count)
    collective.run(into, out_of, world)
    world.settle()
    mistake = check(collective, world, into)
    if mistake is not None:
        where = {"bytes": 4 * count, "rank": world.rank}
        found = dict(zip(("element", "got", "expected"), mistake, strict=True))
        results.wrong.append({"collective": collective.name, **where, **found})
    each = timed(world, collective, into, out_of, 1)
    alone = world.most(time.monotonic() - began)
    runs = max(1, min(MOST_RUNS, int(budget / max(each, 1e-9))))
    if runs > 1:
        each = timed(world, collective, into, out_of, runs)
    rate = 4 * count * collective.busbw(world.size) / each
    results.rows.append({**row, "seconds": each, "busbw": rate, "runs": runs})
    return alone


def timed(world: World, collective: Collective, into: Tensor, out_of: Tensor, runs: int) -> float:
    """Return the seconds per run, of the slowest rank."""
    if collective.name == "all_reduce":
        into.zero_()  # Sums of sums of sums would end in infinity.
    world.settle()
    world.most(0.0)
    return world.most(world.seconds(lambda: collective.run(into, out_of, world), runs))


def barrier(world: World) -> dict[str, Any]:
    own = [world.device.index] if world.device.type == "cuda" else None
    dist.barrier(device_ids=own)
    each = world.most(world.seconds(lambda: dist.barrier(device_ids=own), MOST_RUNS))
    world.say(f"barrier: {1e6 * each:,.0f} us")
    row = {"collective": "barrier", "ranks": world.size, "bytes": 0}
    return {**row, "seconds": each, "busbw": 0.0, "runs": MOST_RUNS}


def line(collective: Collective, rows: list[dict[str, Any]]) -> str:
    """Format rank 0's line about a collective that is done."""
    if not rows:
        return f"{collective.name}: no memory for any size"
    best = max(rows, key=lambda row: float(row["busbw"]))
    least, at, most = (text.size(row["bytes"], binary=True) for row in (rows[0], best, rows[-1]))
    first = f"{least} in {1e6 * rows[0]['seconds']:,.0f} us"
    return f"{collective.name}: {first}, best {8e-9 * best['busbw']:.3g} Gb/s at {at}, up to {most}"
