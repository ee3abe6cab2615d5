"""Run and time the collectives of `orchestrator verify`, and check their results.

Every element of every result is compared. The values are small integers, which float32 adds up
exactly. They differ between ranks and between adjacent elements, so a missing, repeated or
misplaced block is detected.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.common import text
from orchestrator.common.errors import CheckFailed
from orchestrator.engine.observe import speed
from orchestrator.engine.observe.reporter import say_from_rank_0
from orchestrator.engine.ranks.collectives import choose_backend
from orchestrator.engine.ranks.ranks import Ranks, device_of_rank, free_host_memory

T = TypeVar("T")


def exchange_values(what: T) -> list[T]:
    """Return every rank's value, in order of rank, on every rank."""
    values: list[Any] = [what] * dist.get_world_size()
    dist.all_gather_object(values, what)
    return values


def largest_value(value: float) -> float:
    """Return the largest value of all ranks. It is also a barrier."""
    return max(exchange_values(value))


def join_group(backend: str | None, patience: float) -> Ranks:
    """Join the process group, by NCCL on GPUs or gloo on CPUs, with a timeout of `patience`."""
    backend = choose_backend(backend)
    device = device_of_rank() if backend == "nccl" else torch.device("cpu")
    # Objects are sent as CPU tensors, which NCCL cannot send, so gloo is there as well.
    both = "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"
    dist.init_process_group(both, timeout=datetime.timedelta(seconds=patience))
    own = int(os.environ.get("GROUP_RANK", "0")), os.uname().nodename, backend
    described = exchange_values(own)
    without = sorted({host for _, host, its in described if its != "nccl"})
    if len({its for _, _, its in described}) > 1:
        raise CheckFailed(
            f"some nodes have GPUs that torch can use, these have none: {', '.join(without)}",
            "verify the CPUs of all with --backend gloo, or leave those out of the list",
        )
    nodes = tuple((node, host) for node, host, _ in described)
    local = int(os.environ["LOCAL_RANK"])
    return Ranks(dist.get_rank(), dist.get_world_size(), local, device, nodes)


def free_bytes(ranks: Ranks) -> int:
    """Return the free memory of a rank: its GPU's, or an equal part of the node's free memory."""
    if ranks.device.type == "cuda":
        return int(torch.cuda.mem_get_info(ranks.device)[0])
    return free_host_memory() // len(ranks.neighbours)


# This is a prime, so two adjacent blocks whose size is a power of two differ.
PERIOD = 61
WEIGHTS = 31
SMALLEST_BYTES = 1 << 10
# The factor from one size to the next.
GROWTH = 4
MOST_RUNS = 50
# The timed runs of one size take a twentieth of a collective's time.
RUNS_PART = 20
# The most copies of a size at once: input, output, expected result, and those of the backend.
COPIES = 6
# The reasons why sizes end before --max-size.
TIME, MEMORY = "time", "memory"


class Call(NamedTuple):
    """A collective on tensors of one size, its result and the expected result."""

    run: Callable[[], Any]
    result: Tensor
    expected: Tensor


def all_reduce(ranks: Ranks, count: int) -> Call:
    data = repeated_pattern(ranks, count, factor_of_rank(ranks.rank))
    return Call(
        lambda: dist.all_reduce(data), data, repeated_pattern(ranks, count, total_ranks(ranks))
    )


def all_gather(ranks: Ranks, count: int) -> Call:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    parts = [
        repeated_pattern(ranks, count // ranks.world, factor_of_rank(rank))
        for rank in range(ranks.world)
    ]
    result = torch.zeros(count, device=ranks.device)
    return Call(lambda: gather(result, parts[ranks.rank]), result, torch.cat(parts))


def reduce_scatter(ranks: Ranks, count: int) -> Call:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    own, part = repeated_pattern(ranks, count, factor_of_rank(ranks.rank)), count // ranks.world
    result = torch.zeros(part, device=ranks.device)
    expected = repeated_pattern(ranks, part, total_ranks(ranks), ranks.rank * part)
    return Call(lambda: scatter(result, own), result, expected)


# Each name has the call for a number of elements, and the factor from bytes of the larger side to
# bytes on the busiest link, as nccl-tests defines bus bandwidth (doc/PERFORMANCE.md there).
COLLECTIVES: dict[str, tuple[Callable[[Ranks, int], Call], Callable[[int], float]]] = {
    "all_reduce": (all_reduce, lambda n: 2 * (n - 1) / n),
    "all_gather": (all_gather, lambda n: (n - 1) / n),
    "reduce_scatter": (reduce_scatter, lambda n: (n - 1) / n),
}


# -- values ---------------------------------------------------------------------------------------


def factor_of_rank(rank: int) -> int:
    return rank % WEIGHTS + 1


def total_ranks(ranks: Ranks) -> int:
    return sum(map(factor_of_rank, range(ranks.world)))


def repeated_pattern(ranks: Ranks, count: int, times: int, start: int = 0) -> Tensor:
    """Return a tensor that repeats 1 to PERIOD, multiplied by `times`, from element `start` on."""
    return ((torch.arange(count, device=ranks.device) + start) % PERIOD + 1).float() * times


def first_wrong(call: Call) -> dict[str, float] | None:
    """Return the first wrong element with its value and the expected one, or None."""
    if torch.equal(call.result, call.expected):
        return None
    at = int((call.result != call.expected).nonzero()[0])
    return {"element": at, "got": float(call.result[at]), "expected": float(call.expected[at])}


# -- measuring ------------------------------------------------------------------------------------


@dataclass
class Results:
    """The results of all collectives so far, on this rank."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def measure_collectives(ranks: Ranks, largest: int, seconds: float) -> Results:
    """Run every collective at every size that the time and the memory allow."""
    results = Results()
    deadline = time.monotonic() + seconds
    for index, name in enumerate(COLLECTIVES):
        left = largest_value(max(0.0, deadline - time.monotonic()))
        began = len(results.rows)
        reason = measure_sizes(ranks, name, largest, left / (len(COLLECTIVES) - index), results)
        say_from_rank_0(ranks, result_line(name, results.rows[began:]))
        if reason and reason not in results.notes:
            results.notes.append(reason)
    return results


def measure_sizes(ranks: Ranks, name: str, largest: int, share: float, results: Results) -> str:
    """Measure sizes from 1 KB to `largest`; return why it ended early (TIME or MEMORY), or "".

    All ranks stop at the same size, because they decide by the maximum over all ranks.
    """
    # The first call connects, so it is not timed.
    COLLECTIVES[name][0](ranks, ranks.world).run()
    spent, last, size = 0.0, 0.0, SMALLEST_BYTES
    while size <= largest:
        if spent and spent + GROWTH * last + share / RUNS_PART > share:
            return TIME
        if -largest_value(-float(free_bytes(ranks))) < COPIES * size:
            return MEMORY
        began = time.monotonic()
        last = measure_size(ranks, name, size, share / RUNS_PART, results)
        spent += largest_value(time.monotonic() - began)
        size *= GROWTH
    return ""


def measure_size(ranks: Ranks, name: str, size: int, budget: float, results: Results) -> float:
    """Run, check and time one size; return the seconds of all but the repeated timed runs."""
    began = time.monotonic()
    make, busbw = COLLECTIVES[name]
    count = max(ranks.world, size // 4 // ranks.world * ranks.world)
    row = {"collective": name, "bytes": 4 * count}
    call = make(ranks, count)
    call.run()
    if mistake := first_wrong(call):
        results.wrong.append({**row, "rank": ranks.rank, **mistake})
    # An all-reduce in place, repeated on its own result, would overflow.
    call.result.zero_()
    each = largest_value(speed.seconds_of(call.run, ranks.device))
    alone = largest_value(time.monotonic() - began)
    runs = max(1, min(MOST_RUNS, int(budget / max(each, 1e-9))))
    each = largest_value(speed.seconds_of(call.run, ranks.device, runs))
    rate = 4 * count * busbw(ranks.world) / each
    results.rows.append({**row, "ranks": ranks.world, "seconds": each, "busbw": rate, "runs": runs})
    return alone


def result_line(name: str, rows: list[dict[str, Any]]) -> str:
    """Return rank 0's line about a collective that is done."""
    if not rows:
        return f"{name}: no memory for any size"
    best = max(rows, key=lambda row: float(row["busbw"]))
    least, at, most = (
        text.format_bytes(row["bytes"], binary=True) for row in (rows[0], best, rows[-1])
    )
    first = f"{least} in {1e6 * rows[0]['seconds']:,.0f} us"
    return f"{name}: {first}, best {8e-9 * best['busbw']:.3g} Gb/s at {at}, up to {most}"
