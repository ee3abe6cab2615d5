"""Say what to change, and predict from the measured parts of a step what it would bring. Pure.

The rank that the others wait for least decides how long a step takes; its exposed communication is
transfer and no wait. docs/engine.md states what each prediction assumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.traces.overlap import Overlap
from orchestrator.traces.rank import Rank

LEAST = 0.05  # of the time per sample that must be won, or nothing is said
ENOUGH = 0.10  # of the step: exposed communication that is small
FACTORS = (2, 4, 8)
MOST_WORKERS = 32
IDLE = 0.25  # of a GPU's time: less is normal


@dataclass(frozen=True)
class Hint:
    """One change, and the time per sample with it as a part of the time now."""

    kind: str
    text: str
    change: str  # what to type
    step_ms: float  # now
    predicted_ms: float  # a step, with the change
    speedup: float  # samples per second, against now


@dataclass(frozen=True)
class Step:
    """The step of the rank that decides, in milliseconds."""

    rank: Rank
    about: Mapping[str, Any]

    def __getattr__(self, name: str) -> float:
        """Return any time of the rank, per step: `window`, `exposed`, `data` and so on."""
        value: float = getattr(self.rank, f"{name}_ms")
        return value / self.rank.steps

    def exposed_of(self, *kinds: str) -> float:
        known = sum(self.rank.exposed_kinds.get(kind, 0.0) for kind in kinds) / self.rank.steps
        return min(self.exposed, known)

    @property
    def accumulate(self) -> int:
        value = self.about.get("accumulate", 1)
        return value if isinstance(value, int) and 0 < value < 1 << 20 else 1

    @property
    def built_in(self) -> bool:
        return self.about.get("built_in") is True


def hint(overlap: Overlap, about: Mapping[str, Any], label: Callable[[int], str]) -> Hint | None:
    """Return what would bring most, if the traces carry it."""
    if not overlap.ranks:
        return None
    number = min(overlap.ranks, key=lambda rank: (overlap.waited_ms[rank], rank))
    step = Step(overlap.ranks[number], about)
    if step.window <= 0:
        return None
    proposals = [
        slow_rank(overlap, step, label),
        accumulation(step),
        gathering(step),
        data(step),
        idle(step),
    ]
    worth = [one for one in proposals if one is not None and 1 - 1 / one.speedup >= LEAST]
    return max(worth, key=lambda one: one.speedup, default=None)


def part(value: float, whole: float) -> str:
    return f"{value / whole:.0%} of the step ({ms(value)} of {ms(whole)} ms)"


def ms(value: float) -> str:
    """Write milliseconds with three digits, or with all that are before the point."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def faster(speedup: float) -> str:
    return f"{speedup:.2g} times the samples per second"


def slow_rank(overlap: Overlap, step: Step, label: Callable[[int], str]) -> Hint | None:
    if overlap.straggler is None or overlap.lag_ms >= step.window:
        return None
    lag, now = overlap.lag_ms, step.window
    speedup = now / (now - lag)
    text = (
        f"the others wait for {label(overlap.straggler)} {part(lag, now)}; if it were as"
        f" quick as they are: {ms(now - lag)} ms, {faster(speedup)} (predicted)"
    )
    change = "look at its node: orchestrator doctor, orchestrator top"
    return Hint("slow rank", text, change, now, now - lag, speedup)


def accumulation(step: Step) -> Hint | None:
    """Predict more micro-batches per step: what is sent once per step is paid less often."""
    once, now = step.exposed_of(*sent_once(step)), step.window
    micro = (now - once - step.optimizer) / step.accumulate
    if once <= ENOUGH * now or micro <= 0:
        return None
    for factor in FACTORS:
        wanted = step.accumulate * factor
        then = wanted * micro + once + step.optimizer
        if once <= ENOUGH * then:
            break
    speedup = now * factor / then
    text = (
        f"exposed communication is {part(once, now)}; gradient accumulation {wanted} instead of"
        f" {step.accumulate}: predicted {once / then:.0%}, {faster(speedup)}"
        f" (a step then counts {factor} times as many)"
    )
    change = f"Trainer(accumulate={wanted})"
    if step.built_in:
        change = f"--set training.gradient_accumulation={wanted}"
    if not step.about:
        change = "call backward() of all micro-batches but the last under model.no_sync()"
    return Hint("accumulation", text, change, now, then, speedup)


def sent_once(step: Step) -> tuple[str, ...]:
    """Name what is sent once per step, however many micro-batches it has: see mesh.backward."""
    strategy, whole = step.about.get("strategy"), step.about.get("sums_whole") is True
    if strategy in ("full_shard", "shard_grad_op"):
        return ("scattered gradients",) if whole else ()
    if strategy == "hybrid_shard":
        return ("gradients", "scattered gradients") if whole else ("gradients",)
    known = strategy == "ddp" or "parameters" not in step.rank.exposed_kinds
    return ("gradients",) if known else ()


def gathering(step: Step) -> Hint | None:
    """Predict parameters that stay whole from forward to backward: one gather in place of two."""
    if step.about.get("strategy") not in ("full_shard", "hybrid_shard"):
        return None
    if step.about.get("reshards") is not True:
        return None
    now = step.window
    saved = step.exposed_of("parameters") / 2
    speedup = now / (now - saved)
    text = (
        f"gathering parameters is exposed for {part(2 * saved, now)}; kept from forward to"
        f" backward, which takes the memory of the whole model: predicted {ms(now - saved)} ms,"
        f" {faster(speedup)}"
    )
    return Hint(
        "gathering", text, "--set fsdp.reshard_after_forward=false", now, now - saved, speedup
    )


def data(step: Step) -> Hint | None:
    """Predict loader processes that are enough: the training then never waits for a batch."""
    waits, now = step.data, step.window
    if waits <= 0 or waits >= now:
        return None
    workers = step.about.get("workers")
    speedup = now / (now - waits)
    text = f"the training waits for data {part(waits, now)}; "
    change = "DataLoader(num_workers=...)"
    if isinstance(workers, int) and 0 <= workers < 1 << 16:
        # What loading one step's batches takes one process, and the time that is left for it.
        loading = workers * now if workers else waits
        wanted = max(workers + 1, math.ceil(loading / (now - waits)))
        if wanted > MOST_WORKERS:
            text += f"that would take {wanted} loader processes per rank: "
            text += "prepare the data beforehand, or read it from a faster disk"
            return Hint("data", text, "", now, now - waits, speedup)
        text += f"{wanted} loader processes per rank instead of {workers}: "
        change = f"DataLoader(num_workers={wanted})"
        if step.built_in:
            change = f"--set dataloader.num_workers={wanted}"
    else:
        text += "more loader processes: "
    text += f"predicted {ms(now - waits)} ms, {faster(speedup)}"
    return Hint("data", text, change, now, now - waits, speedup)


def idle(step: Step) -> Hint | None:
    """Tell of a GPU that waits for its host; what it would bring is a bound, and no prediction."""
    if not step.rank.gpu:
        return None
    rests, now = step.idle - step.data, step.window
    if rests < IDLE * now or rests >= now:
        return None
    speedup = now / (now - rests)
    text = (
        f"the GPU is idle {part(rests, now)} and not for data: the host launches kernels too"
        f" slowly; larger batches or compiled blocks bring at most {faster(speedup)}"
    )
    change = "--set compile.enabled=true" if step.built_in else "torch.compile(model)"
    return Hint("idle", text, change, now, now - rests, speedup)
