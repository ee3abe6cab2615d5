"""Keep the batch of a job that goes on with another number of ranks: one curve over all attempts.

A later attempt is told with how many ranks the first one began. A run that somebody resumes by hand
is another job, and its batch is what its own config says.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.common.text import plural
from orchestrator.config.schema import Config

VARIABLE = "ORCHESTRATOR_FIRST_WORLD_SIZE"


@dataclass(frozen=True)
class Share:
    """The part of each step that every rank works off."""

    accumulation: int  # micro-batches
    batch_size: int | None  # samples in each; None: the user's own loader decides


def share(first: int, world: int, accumulation: int, batch_size: int | None) -> Share:
    """Divide the step of `first` ranks among `world`: equal where it divides, else the nearest.

    Micro-batches are made smaller where their number does not divide, never larger: they have to
    fit into the memory of a device.
    """
    micros = first * accumulation
    if micros % world == 0:
        return Share(micros // world, batch_size)
    if batch_size is not None and micros * batch_size % world == 0:
        samples = micros * batch_size // world  # samples of a rank
        size = max(size for size in range(1, batch_size + 1) if samples % size == 0)
        if samples // size <= 2 * -(
            -samples // batch_size
        ):  # 13 micro-batches of one sample are no gain
            return Share(samples // size, size)
    if batch_size is None:
        return Share(max(1, round(micros / world)), None)
    ideal = micros * batch_size / world
    counts = {max(1, math.floor(ideal / batch_size)), math.ceil(ideal / batch_size)}
    shares = [Share(n, min(batch_size, max(1, round(ideal / n)))) for n in sorted(counts)]
    return min(shares, key=lambda one: abs(one.accumulation * (one.batch_size or 1) - ideal))


def first_world(world: int) -> int:
    """Return with how many ranks the first attempt of this job began."""
    value = os.environ.get(VARIABLE, "")
    return int(value) if value.isdecimal() and int(value) else world


def keep_batch(config: Config, world: int, say: Callable[[str], None], *, loader: bool) -> Config:
    """Return the config for this number of ranks, and say what a step is made of if it is another.

    `loader`: the batches are those of a user's own DataLoader.
    """
    first, training = first_world(world), config.training
    if first == world:
        return config
    size = None if loader else training.batch_size
    share_now = share(first, world, training.gradient_accumulation, size)
    say(in_words(first, world, training.gradient_accumulation, size, share_now))
    changed = dataclasses.replace(training, gradient_accumulation=share_now.accumulation)
    if share_now.batch_size is not None:
        changed = dataclasses.replace(changed, batch_size=share_now.batch_size)
    if training.eval_batches is not None:  # an evaluation, too, sees as many samples
        samples = training.eval_batches * first * (size or 1)
        batches = max(1, round(samples / (world * (share_now.batch_size or 1))))
        changed = dataclasses.replace(changed, eval_batches=batches)
    return dataclasses.replace(config, training=changed)


def in_words(first: int, world: int, accumulation: int, size: int | None, share_now: Share) -> str:
    """Say how many samples a step has now, or micro-batches where nobody knows their size."""
    what = "micro-batches" if size is None else "samples"
    before = first * accumulation * (size or 1)
    now = world * share_now.accumulation * (share_now.batch_size or 1)
    micros = f"{share_now.accumulation} micro-batch{'' if share_now.accumulation == 1 else 'es'}"
    micros += "" if share_now.batch_size is None else f" of {share_now.batch_size}"
    ranks = f"{plural(world, 'rank')} in place of {first}"
    if now == before:
        return f"{ranks}: a step keeps its {before} {what}, {micros} on each rank"
    return (
        f"WARNING: {ranks} cannot share the {before} {what} of a step equally: a step has {now}"
        f" from now on, {micros} on each rank"
    )
