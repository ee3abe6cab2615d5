"""Predict the time of a training step on the links that were measured. Pure.

Computing: the timed parts of the model. Communicating: what each strategy sends, message by
message, each at the time that its size took in the measurement. docs/decisions/why.md has
the formula, what it assumes, and how far off it was.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.config.schema import COPIED, Config

MEASURED = ("hybrid_shard", "full_shard", "ddp")


@dataclass(frozen=True)
class Times:
    """Seconds of one collective among some ranks, by size."""

    points: tuple[tuple[int, float], ...]  # (bytes, seconds), the smallest first

    def of(self, size: float) -> float:
        """Interpolate between measured sizes, both axes logarithmic."""
        sizes = [point[0] for point in self.points]
        at = bisect_left(sizes, size)
        if at == 0:
            return self.points[0][1]
        if at == len(sizes):  # beyond the largest, only the bandwidth counts
            largest, seconds = self.points[-1]
            return seconds * size / largest
        (a, slow), (b, slower) = self.points[at - 1], self.points[at]
        part = math.log(size / a) / math.log(b / a)
        return math.exp((1 - part) * math.log(slow) + part * math.log(slower))


@dataclass(frozen=True)
class Message:
    """One collective that a step calls `count` times, `exposed` of them without overlap."""

    collective: str
    scope: str
    bytes: float
    count: int
    exposed: int = 0


@dataclass(frozen=True)
class Prediction:
    """One strategy. Seconds of a step, and of its parts; bytes that a rank holds."""

    strategy: str
    step: float
    compute: float
    communication: float
    memory: float
    fits: bool
    configured: bool
    beyond: bool  # some message is larger than all that were measured


Measured = Mapping[tuple[str, str], Times]  # (collective, scope)


def predict(results: Mapping[str, Any], config: Config) -> list[Prediction]:
    """Return the predictions, the best first; those that do not fit into memory come last."""
    model = results.get("model") or {}
    counts = [len(node["ranks"]) for node in results["nodes"]]
    world = sum(counts)
    if "groups" not in model or world == 1 or not results.get("collectives"):
        return []
    measured = times(results["collectives"])
    strategies = [name for name in MEASURED if name != "hybrid_shard" or len(set(counts)) == 1]
    overlap = results["devices"][0] != "CPU"
    predictions = [
        predict_strategy(name, model, counts, config, measured, results["free_bytes"], overlap)
        for name in strategies
    ]
    return sorted(predictions, key=lambda prediction: (not prediction.fits, prediction.step))


def times(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Times]:
    points_by_key: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        key = (row["collective"], row["scope"])
        points_by_key.setdefault(key, []).append((row["bytes"], row["seconds"]))
    return {key: Times(tuple(sorted(points))) for key, points in points_by_key.items()}


def predict_strategy(
    strategy: str,
    model: Mapping[str, Any],
    counts: Sequence[int],
    config: Config,
    measured: Measured,
    free: float,
    overlap: bool,
) -> Prediction:
    shards = {"ddp": 1, "full_shard": sum(counts), "hybrid_shard": counts[0]}[strategy]
    groups: list[int] = model["groups"]
    sent = messages(strategy, groups, counts, config)
    total = sum(message.count * cost(message, measured) for message in sent)
    exposed = sum(message.exposed * cost(message, measured) for message in sent)
    compute = config.training.gradient_accumulation * (model["micro_batch"] or 0.0)
    compute += model["optimizer"] * model["parameters"] / shards
    step = max(compute + exposed, total) if overlap else compute + total
    memory = memory_of(strategy, groups, shards, config)
    beyond = any(message.bytes > table(message, measured).points[-1][0] for message in sent)
    wanted = config.fsdp.sharding_strategy
    configured = strategy == ("ddp" if wanted in COPIED else wanted)
    return Prediction(strategy, step, compute, total, memory, memory < free, configured, beyond)


def messages(
    strategy: str, groups: Sequence[int], counts: Sequence[int], config: Config
) -> list[Message]:
    """Return the collectives that a rank calls in one step.

    Groups are gathered one by one; the first holds the parameters outside of the blocks.
    """
    world, micro = sum(counts), config.training.gradient_accumulation
    calls = [Message("all_reduce", "all", 1024, 2, 2)]  # sums of the step, and who wants to stop
    if strategy == "ddp":
        size = 4 * sum(groups)
        bucket = min(size, config.distributed.bucket_cap_mb * (1 << 20))
        number = max(1, math.ceil(size / bucket))
        return [*calls, Message("all_reduce", "all", size / number, number, 1)]
    gathered = 4 if config.training.mixed_precision == "fp32" else 2
    reduced = 4 if config.fsdp.reduce_dtype == "fp32" else 2
    twice = 2 if config.fsdp.reshard_after_forward else 1
    sums = micro if config.fsdp.accumulate == "sharded" else 1
    shards, scope = (
        (world, "all") if strategy == "full_shard" or len(counts) == 1 else (counts[0], "node")
    )
    for index, group in enumerate(groups):
        ends = index < 2  # the first gathers, and the last sums, overlap with nothing
        if shards > 1:
            times_gathered = micro * (twice if index else 1)
            calls.append(
                Message("all_gather", scope, gathered * group, times_gathered, ends * micro)
            )
            calls.append(Message("reduce_scatter", scope, reduced * group, sums, int(ends)))
        if scope == "node":
            across = "all" if shards == 1 else "across"
            calls.append(Message("all_reduce", across, reduced * group / shards, 1, int(ends)))
    return calls


def table(message: Message, measured: Measured) -> Times:
    return measured[message.collective, message.scope]


def cost(message: Message, measured: Measured) -> float:
    return table(message, measured).of(message.bytes)


def memory_of(strategy: str, groups: Sequence[int], shards: int, config: Config) -> float:
    """Return the bytes of weights, gradients and the optimizer's moments, without activations."""
    each = 12 if config.optimizer.name == "sgd" else 16
    local = each * sum(groups) / shards
    if strategy == "ddp" or shards == 1:
        return local
    return local + 4.0 * (groups[0] + 2 * max(groups[1:], default=0))
