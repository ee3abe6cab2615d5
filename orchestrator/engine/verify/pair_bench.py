"""Measure the bandwidth and latency between each two nodes, in each direction.

Disjoint pairs are measured at the same time, in the rounds of a round-robin tournament (the circle
method). n nodes then take n - 1 rounds instead of n * n.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.engine.observe import speed
from orchestrator.engine.observe.reporter import say_from_rank_0
from orchestrator.engine.ranks.ranks import Ranks
from orchestrator.engine.verify.collective_bench import exchange_values, largest_value

# The smallest and the largest message, in bytes.
FIRST, LARGEST = 1 << 14, 1 << 26
# The least and the most seconds for one direction of a pair.
SHORTEST, LONGEST = 0.04, 0.25
# Messages grow until only about this many fit into that time. More short messages are better than
# few long ones, because other traffic disturbs fewer of them.
MESSAGES = 20
# Messages also grow while the last growth raised the rate by this factor: latency still dominates.
GAIN = 1.5
PINGS = 10

Pair = tuple[int, int]
Row = dict[str, Any]


def rounds_of_pairs(nodes: int) -> list[list[Pair]]:
    """Return rounds of pairs: each two nodes meet once, and no node is twice in a round."""
    players = list(range(nodes + nodes % 2))
    plan = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        meetings = zip(players[:half], players[: half - 1 : -1], strict=True)
        plan.append([(min(pair), max(pair)) for pair in meetings if max(pair) < nodes])
        players = [players[0], players[-1], *players[1:-1]]
    return plan if nodes > 1 else []


def measure_pairs(ranks: Ranks, seconds: float) -> list[Row]:
    """Return a row for each ordered pair of nodes: bytes per second and latency in seconds."""
    plan = rounds_of_pairs(len(set(ranks.nodes)))
    deadline = time.monotonic() + seconds
    # A round has two directions, and each takes up to twice this.
    each = min(LONGEST, max(SHORTEST, seconds / (4 * max(1, len(plan)))))
    rows: list[Row] = []
    for number, pairs in enumerate(plan):
        if number and largest_value(time.monotonic() - deadline) > 0:
            say_from_rank_0(
                ranks, f"pairs of nodes: the time is up; {len(plan) - number} rounds are left out"
            )
            break
        rows += measure_round(ranks, pairs, each)
        say_from_rank_0(ranks, f"pairs of nodes: round {number + 1} of {len(plan)}")
    return sorted(rows, key=lambda row: (row["from"], row["to"]))


def measure_round(ranks: Ranks, pairs: list[Pair], budget: float) -> list[Row]:
    """Measure these pairs at the same time, first in one direction, then in the other.

    Each rank sends to one rank of the other node; such a connection is a lane. The rate of a pair
    is the sum of its lanes.
    """
    own: list[Row] = []
    for forward in (True, False):
        largest_value(0.0)
        for a, b in pairs:
            source, target = (a, b) if forward else (b, a)
            for sender, receiver in zip(ranks.of_node(source), ranks.of_node(target), strict=False):
                if ranks.rank == sender:
                    rate, latency = send_data(ranks, receiver, budget)
                    own.append({"from": source, "to": target, "rate": rate, "latency": latency})
                elif ranks.rank == receiver:
                    receive_data(ranks, sender)
    joined: dict[Pair, Row] = {}
    for row in (row for rows in exchange_values(own) for row in rows):
        pair = joined.setdefault((row["from"], row["to"]), {**row, "rate": 0.0, "lanes": 0})
        pair["rate"] += row["rate"]
        pair["latency"] = min(pair["latency"], row["latency"])
        pair["lanes"] += 1
    return list(joined.values())


# -- one lane -------------------------------------------------------------------------------------


def send_data(ranks: Ranks, to: int, budget: float) -> tuple[float, float]:
    """Return the bytes per second and the latency to another rank.

    Messages grow until about MESSAGES of them fill the budget and larger ones are no faster. The
    receiver gets each size before the message, and 0 at the end.
    """
    data = torch.zeros(LARGEST, dtype=torch.uint8, device=ranks.device)
    # The first transfer connects, so it is not timed.
    transfer_tensor(ranks, to, data[:FIRST])
    latency = min(transfer_tensor(ranks, to, data[:1]) for _ in range(PINGS)) / 2
    until, size, smaller = time.monotonic() + budget, FIRST, 0.0
    times = [transfer_tensor(ranks, to, data[:size])]
    while time.monotonic() + min(times) < until:
        rate = size / min(times)
        if size < LARGEST and (min(times) < budget / MESSAGES or rate > GAIN * smaller):
            smaller, size, times = rate, 4 * size, []
        times.append(transfer_tensor(ranks, to, data[:size]))
    dist.send(torch.tensor([0]), to)
    # The median avoids the slowest message, which was disturbed, and the fastest. After a pause a
    # switch passes some bytes at once, and ranks that share a link take bandwidth from each other.
    return size / statistics.median(times), latency


def receive_data(ranks: Ranks, sender: int) -> None:
    data = torch.zeros(LARGEST, dtype=torch.uint8, device=ranks.device)
    size = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.recv(size, sender)
        if not size:
            return
        for what, part in ((dist.irecv, data[: int(size)]), (dist.isend, data[:1])):
            one_way(what, part, sender)
            speed.settle_device(ranks.device)


def transfer_tensor(ranks: Ranks, to: int, data: Tensor) -> float:
    """Send a tensor; return the seconds until the receiver has acknowledged all of it."""
    dist.send(torch.tensor([data.numel()]), to)
    answer = torch.zeros(1, dtype=torch.uint8, device=ranks.device)

    def there_and_back() -> None:
        one_way(dist.isend, data, to)
        one_way(dist.irecv, answer, to)

    return speed.seconds_of(there_and_back, ranks.device)


def one_way(what: Any, data: Tensor, peer: int) -> None:
    """Send or receive as a batch of one, so that NCCL reuses the existing communicator."""
    for work in dist.batch_isend_irecv([dist.P2POp(what, data, peer)]):
        work.wait()
