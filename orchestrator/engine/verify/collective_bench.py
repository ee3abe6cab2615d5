"""Run and time the collectives of `orchestrator verify`, and check their results.

Every element of every result is compared. The values are small integers, which float32 adds up
exactly. They differ between ranks and between adjacent elements, so a missing, repeated or
misplaced block is detected.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.common import text
from orchestrator.common.errors import CheckFailed
from orchestrator.engine.observe import speed
from orchestrator.engine.ranks.ranks import free_host_memory


@dataclass(frozen=True)
class World:
    """This rank and the process group; `nodes` and `hosts` list those of every rank."""

    rank: int
    size: int
    backend: str
    device: torch.device
    nodes: tuple[int, ...]
    hosts: tuple[str, ...]

    def of_node(self, node: int) -> list[int]:
        return [rank for rank, its in enumerate(self.nodes) if its == node]

    def exchange(self, what: Any) -> list[Any]:
        """Return every rank's value, in order of rank, on every rank."""
        own = bytearray(json.dumps(what).encode("ascii"))
        sizes = _gathered(torch.tensor([len(own)]), self.size)
        room = int(max(sizes))
        padded = torch.zeros(room, dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(own, dtype=torch.uint8)
        texts = zip(_gathered(padded, self.size), sizes, strict=True)
        return [json.loads(bytes(text[: int(size)].tolist())) for text, size in texts]

    def most(self, value: float) -> float:
        """Return the largest value of all ranks. It is also a barrier."""
        largest = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)

    def seconds(self, run: Callable[[], Any], runs: int = 1) -> float:
        return speed.seconds_of(run, self.device, runs)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def _gathered(own: Tensor, size: int) -> list[Tensor]:
    values = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(values, own)
    return values


def join(backend: str | None, patience: float) -> World:
    """Join the process group, by NCCL on GPUs or gloo on CPUs, with a timeout of `patience`."""
    has_gpu = torch.cuda.is_available()
    backend = backend or ("nccl" if has_gpu else "gloo")
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if backend == "nccl":
        if local >= torch.cuda.device_count():
            raise CheckFailed(
                f"local rank {local} of {socket.gethostname()} has no GPU of its own",
                "start as many ranks as there are GPUs (leave out --nproc and slots=), or verify"
                " the CPUs with --backend gloo",
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=patience)
    # Messages are CPU tensors, which NCCL cannot send, so gloo is there as well.
    dist.init_process_group("cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo", timeout=timeout)
    alone = World(rank, dist.get_world_size(), backend, device, (), ())
    own = [int(os.environ.get("GROUP_RANK", "0")), socket.gethostname(), backend]
    described = alone.exchange(own)
    nodes, hosts = tuple(entry[0] for entry in described), tuple(entry[1] for entry in described)
    without = sorted({host for _, host, its in described if its != "nccl"})
    if len({its for _, _, its in described}) > 1:
        raise CheckFailed(
            f"some nodes have GPUs that torch can use, these have none: {', '.join(without)}",
            "verify the CPUs of all with --backend gloo, or leave those out of the list",
        )
    return World(rank, alone.size, backend, device, nodes, hosts)


def free_bytes(world: World) -> int:
    """Return the free memory of a rank: its GPU's, or an equal part of the node's free memory."""
    if world.device.type == "cuda":
        return int(torch.cuda.mem_get_info(world.device)[0])
    return free_host_memory() // len(world.of_node(world.nodes[world.rank]))


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


def all_reduce(world: World, count: int) -> Call:
    data = pattern(world, count, factor(world.rank))
    return Call(lambda: dist.all_reduce(data), data, pattern(world, count, total(world)))


def all_gather(world: World, count: int) -> Call:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    parts = [pattern(world, count // world.size, factor(rank)) for rank in range(world.size)]
    result = torch.zeros(count, device=world.device)
    return Call(lambda: gather(result, parts[world.rank]), result, torch.cat(parts))


def reduce_scatter(world: World, count: int) -> Call:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    own, part = pattern(world, count, factor(world.rank)), count // world.size
    result = torch.zeros(part, device=world.device)
    expected = pattern(world, part, total(world), world.rank * part)
    return Call(lambda: scatter(result, own), result, expected)


# Each name has the call for a number of elements, and the factor from bytes of the larger side to
# bytes on the busiest link, as nccl-tests defines bus bandwidth (doc/PERFORMANCE.md there).
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
    """Return a tensor that repeats 1 to PERIOD, multiplied by `times`, from element `start` on."""
    return ((torch.arange(count, device=world.device) + start) % PERIOD + 1).float() * times


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
    """Measure sizes from 1 KB to `largest`; return why it ended early (TIME or MEMORY), or "".

    All ranks stop at the same size, because they decide by the maximum over all ranks.
    """
    # The first call connects, so it is not timed.
    COLLECTIVES[name][0](world, world.size).run()
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
    """Run, check and time one size; return the seconds of all but the repeated timed runs."""
    began = time.monotonic()
    make, busbw = COLLECTIVES[name]
    count = max(world.size, size // 4 // world.size * world.size)
    row = {"collective": name, "bytes": 4 * count}
    call = make(world, count)
    call.run()
    if mistake := first_wrong(call):
        results.wrong.append({**row, "rank": world.rank, **mistake})
    # An all-reduce in place, repeated on its own result, would overflow.
    call.result.zero_()
    each = world.most(world.seconds(call.run))
    alone = world.most(time.monotonic() - began)
    runs = max(1, min(MOST_RUNS, int(budget / max(each, 1e-9))))
    each = world.most(world.seconds(call.run, runs))
    rate = 4 * count * busbw(world.size) / each
    results.rows.append({**row, "ranks": world.size, "seconds": each, "busbw": rate, "runs": runs})
    return alone


def line(name: str, rows: list[dict[str, Any]]) -> str:
    """Return rank 0's line about a collective that is done."""
    if not rows:
        return f"{name}: no memory for any size"
    best = max(rows, key=lambda row: float(row["busbw"]))
    least, at, most = (text.size(row["bytes"], binary=True) for row in (rows[0], best, rows[-1]))
    first = f"{least} in {1e6 * rows[0]['seconds']:,.0f} us"
    return f"{name}: {first}, best {8e-9 * best['busbw']:.3g} Gb/s at {at}, up to {most}"
