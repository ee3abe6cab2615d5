"""The collectives that `orchestrator verify` runs: what goes in, what has to come out, how fast.

Every element of every result is compared. Values are small whole numbers that float32 adds up
exactly, and differ between ranks and between neighbours, so that a block that is missing, doubled,
or in another's place shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.common import text
from orchestrator.engine.verify.teams import Team, World, free_bytes

PERIOD = 61  # a prime: no block of a power of two looks like the next
ELEMENTS_AT_ONCE = PERIOD << 14  # elements compared at a time: a million
WEIGHTS = 31
SMALLEST_BYTES = 1 << 10
GROWTH = 4  # from one size to the next
MOST_RUNS = 50
RUNS_PART = 20  # of a collective's time go into the runs of one size, so sizes share about half
COPIES = 4  # of the largest size that may exist at once: in, out, and what the backend needs

Run = Callable[[Tensor, Tensor, Team], None]


@dataclass(frozen=True)
class Collective:
    """`run(into, out_of, team)`; sizes are those of nccl-tests: bytes of the larger side."""

    name: str
    run: Run
    ins: Callable[[int, int], int]  # (elements, ranks) -> elements of the input
    outs: Callable[[int, int], int]
    busbw: Callable[[int], float]  # bytes on the busiest link / size, by the number of ranks
    # What comes out, in equal pieces: the factor, and the first element of the pattern, of each.
    expected: Callable[[Team, int], list[tuple[int, int]]]


@dataclass(frozen=True)
class Wrong:
    """The first wrong element of one rank's result."""

    collective: str
    scope: str
    bytes: int
    rank: int
    element: int
    got: float
    expected: float


def all_reduce(into: Tensor, out_of: Tensor, team: Team) -> None:
    dist.all_reduce(into, group=team.group)  # in place: `into` holds the input


def all_gather(into: Tensor, out_of: Tensor, team: Team) -> None:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(into, out_of, group=team.group)


def reduce_scatter(into: Tensor, out_of: Tensor, team: Team) -> None:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(into, out_of, group=team.group)


def broadcast(into: Tensor, out_of: Tensor, team: Team) -> None:
    dist.broadcast(into, team.ranks[0], group=team.group)


def send_recv(into: Tensor, out_of: Tensor, team: Team) -> None:
    """Send from each rank to the next, in a ring."""
    after, before = (team.ranks[(team.me + step) % len(team.ranks)] for step in (1, -1))
    ops = [
        dist.P2POp(dist.isend, out_of, after, team.group),
        dist.P2POp(dist.irecv, into, before, team.group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def whole(count: int, ranks: int) -> int:
    return count


def part(count: int, ranks: int) -> int:
    return count // ranks


def nothing(count: int, ranks: int) -> int:
    return 0


# busbw as nccl-tests defines it (doc/PERFORMANCE.md there): the figure to hold against a link.
COLLECTIVES = (
    Collective(
        *("all_reduce", all_reduce, nothing, whole, lambda n: 2 * (n - 1) / n),
        lambda team, count: [(sum(map(weight, team.ranks)), 0)],
    ),
    Collective(
        *("all_gather", all_gather, part, whole, lambda n: (n - 1) / n),
        lambda team, count: [(weight(rank), 0) for rank in team.ranks],
    ),
    Collective(
        *("reduce_scatter", reduce_scatter, whole, part, lambda n: (n - 1) / n),
        lambda team, count: [(sum(map(weight, team.ranks)), team.me * count)],
    ),
    Collective(
        *("broadcast", broadcast, nothing, whole, lambda n: 1.0),
        lambda team, count: [(weight(team.ranks[0]), 0)],
    ),
    Collective(
        *("send_recv", send_recv, whole, whole, lambda n: 1.0),
        lambda team, count: [(weight(team.ranks[team.me - 1]), 0)],
    ),
)
IN_PLACE = ("all_reduce", "broadcast")
TIME, MEMORY = "time", "memory"  # why sizes end before --max-size
NEEDED = {  # by which scope: hybrid_shard's own, beside all of them among all ranks
    "all": [collective.name for collective in COLLECTIVES],
    "node": ["all_gather", "reduce_scatter"],
    "across": ["all_reduce"],
}


# -- values ---------------------------------------------------------------------------------------


def weight(rank: int) -> int:
    return rank % WEIGHTS + 1


def patterned(tensor: Tensor, factor: int, start: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Give a tensor piece by piece: where it begins, the piece, and the pattern that belongs there,
    from element `start` on."""
    count = min(ELEMENTS_AT_ONCE, tensor.numel())
    ramp = (torch.arange(count, device=tensor.device) + start) % PERIOD + 1
    pattern = ramp.float() * factor
    for first in range(0, tensor.numel(), ELEMENTS_AT_ONCE):
        piece = tensor[first : first + ELEMENTS_AT_ONCE]
        yield first, piece, pattern[: piece.numel()]


def fill(tensor: Tensor, factor: int, start: int = 0) -> None:
    for _, piece, pattern in patterned(tensor, factor, start):
        piece.copy_(pattern)


def first_wrong(tensor: Tensor, factor: int, start: int = 0) -> tuple[int, float, float] | None:
    """(element, what it is, what it should be), or None where all are right."""
    for first, piece, expected in patterned(tensor, factor, start):
        if not torch.equal(piece, expected):
            at = int((piece != expected).nonzero()[0])
            return first + at, float(piece[at]), float(expected[at])
    return None


def prepare(
    collective: Collective, team: Team, count: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Make the output, or what is both; and the input."""
    ranks, own = len(team.ranks), weight(team.ranks[team.me])
    into = torch.empty(collective.outs(count, ranks), device=device)
    out_of = torch.empty(collective.ins(count, ranks), device=device)
    if collective.name in IN_PLACE:
        has_it = collective.name == "all_reduce" or team.me == 0
        fill(into, own) if has_it else into.zero_()
    else:
        into.zero_()
        fill(out_of, own)
    return into, out_of


def check(collective: Collective, team: Team, into: Tensor) -> tuple[int, float, float] | None:
    pieces = collective.expected(team, into.numel())
    length = into.numel() // len(pieces)
    for index, (factor, start) in enumerate(pieces):
        mistake = first_wrong(into[index * length : (index + 1) * length], factor, start)
        if mistake is not None:
            return index * length + mistake[0], mistake[1], mistake[2]
    return None


# -- measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Seconds of one size: to make, run, check and time it once; of one run; and all of it."""

    once: float
    each: float
    all: float = 0.0


@dataclass
class Results:
    """The results of all collectives so far, on this rank."""

    rows: list[dict[str, Any]]
    wrong: list[Wrong]
    notes: list[str]


def measure(world: World, teams: list[Team], largest: int, seconds: float) -> Results:
    """Run every collective at every size that the time and the memory allow."""
    results = Results([], [], [])
    deadline = time.monotonic() + seconds
    todo = [
        (collective, team)
        for team in teams
        for collective in COLLECTIVES
        if collective.name in NEEDED[team.scope]
    ]
    for left, (collective, team) in zip(range(len(todo), 0, -1), todo, strict=True):
        share = world.most(max(0.0, deadline - time.monotonic())) / left
        began = len(results.rows)
        reason = grow(world, collective, team, largest, share, results)
        rows = results.rows[began:]
        world.say(line(collective, team, rows))
        if reason and reason not in results.notes:
            results.notes.append(reason)
    results.rows.append(barrier(world))
    return results


def grow(
    world: World, collective: Collective, team: Team, largest: int, share: float, results: Results
) -> str:
    """Try sizes from 1 KB on, until `largest`, the time or the memory ends it; return why.

    All ranks decide alike, because they decide by what all have agreed on.
    """
    ranks, spent, size = len(team.ranks), 0.0, SMALLEST_BYTES
    runs_for = share / RUNS_PART
    into, out_of = prepare(collective, team, ranks, world.device)
    collective.run(into, out_of, team)  # connects
    last = Cost(0.0, 0.0)
    before = last
    while size <= largest:
        # What does not grow with the size is in both; the rest grows as it did.
        grown = last.once + GROWTH * max(0.0, last.once - before.once)
        if spent and spent + grown + max(runs_for, GROWTH * last.each) > share:
            return TIME
        if -world.most(-float(free_bytes(world))) < COPIES * size:
            return MEMORY
        count = max(ranks, size // 4 // ranks * ranks)
        now = once(world, collective, team, count, runs_for, results)
        before, last = (last if spent else now), now
        spent += now.all
        size *= GROWTH
    return ""


def once(
    world: World, collective: Collective, team: Team, count: int, budget: float, results: Results
) -> Cost:
    """Run one size, compare every element, then time it."""
    began = time.monotonic()
    into, out_of = prepare(collective, team, count, world.device)
    collective.run(into, out_of, team)
    world.settle()
    bad = check(collective, team, into)
    if bad is not None:
        element, got, expected = bad
        rank = team.ranks[team.me]
        results.wrong.append(
            Wrong(collective.name, team.scope, 4 * count, rank, element, got, expected)
        )
    each = timed(world, collective, team, into, out_of, 1)
    alone = world.most(time.monotonic() - began)
    runs = max(1, min(MOST_RUNS, int(budget / max(each, 1e-9))))
    if runs > 1:
        each = timed(world, collective, team, into, out_of, runs)
    rate = 4 * count * collective.busbw(len(team.ranks)) / each
    results.rows.append(
        {
            "collective": collective.name,
            "scope": team.scope,
            "ranks": len(team.ranks),
            "bytes": 4 * count,
            "seconds": each,
            "busbw": rate,
            "runs": runs,
        }
    )
    return Cost(alone, each, world.most(time.monotonic() - began))


def timed(
    world: World, collective: Collective, team: Team, into: Tensor, out_of: Tensor, runs: int
) -> float:
    """Return the seconds per run, of the slowest rank."""
    if collective.name == "all_reduce":
        into.zero_()  # sums of sums of sums end in infinity
    world.settle()
    world.most(0.0)
    return world.most(world.seconds(lambda: collective.run(into, out_of, team), runs))


def barrier(world: World) -> dict[str, Any]:
    own = [world.device.index] if world.device.type == "cuda" else None
    dist.barrier(device_ids=own)
    each = world.most(world.seconds(lambda: dist.barrier(device_ids=own), MOST_RUNS))
    world.say(f"barrier: {1e6 * each:,.0f} us")
    same = {"collective": "barrier", "scope": "all", "ranks": world.size, "runs": MOST_RUNS}
    return {**same, "bytes": 0, "seconds": each, "busbw": 0.0}


def line(collective: Collective, team: Team, rows: list[dict[str, Any]]) -> str:
    """Format rank 0's line about a collective that is done."""
    scope = {"all": "all ranks", "node": "within each node", "across": "across nodes"}[team.scope]
    if not rows:
        return f"{collective.name} ({scope}): no memory for any size"
    best = max(rows, key=lambda row: float(row["busbw"]))
    least, at, most = (text.size(row["bytes"], binary=True) for row in (rows[0], best, rows[-1]))
    first = f"{least} in {1e6 * rows[0]['seconds']:,.0f} us"
    top = f"{8e-9 * best['busbw']:.3g} Gb/s at {at}"
    return f"{collective.name} ({scope}): {first}, best {top}, up to {most}"
