"""Evaluate a model over all ranks: the means of losses and metrics, or the outputs themselves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.common.errors import UsageError
from orchestrator.engine.core.parts import Parts
from orchestrator.engine.core.stopping import Metrics
from orchestrator.engine.data.batch import Batches, to_device
from orchestrator.engine.models.losses import Totals
from orchestrator.engine.ranks.ranks import gather
from orchestrator.engine.sharding import low_precision, mesh


def evaluate(
    parts: Parts, held_out: Batches, stop: Callable[[], bool] = lambda: False
) -> Metrics | None:
    """Average over all samples of all ranks, each counted once; None if a rank asks to stop."""
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    model, ranks, config = parts.model, parts.ranks, parts.config
    with parts.steppers.evaluating(), mesh.evaluating(model), torch.no_grad():
        for micro in itertools.islice(held_out.epoch(0), config.training.eval_batches):
            if stop():
                return None
            batch = to_device(micro.data, ranks.device)
            with low_precision.computing(config.training.mixed_precision, ranks.device):
                totals = mesh.as_forward(
                    model,
                    lambda own: parts.losses(own, batch, micro.drawn),  # noqa: B023
                )
                add(sums, totals, real=micro.real)
    refuse_other_names(tuple(sums))
    total = torch.stack([value for pair in sums.values() for value in pair])
    if ranks.world > 1:
        dist.all_reduce(total)
    pairs = zip(sums, total[::2].tolist(), total[1::2].tolist(), strict=True)
    return {name: value / count if count else math.nan for name, value, count in pairs}


def add(sums: dict[str, tuple[Tensor, Tensor]], totals: Totals, *, real: bool) -> None:
    """Add in double precision; what is not real counts as none, but has its place."""
    for name, (total, count) in totals.items():
        pair = total.detach().double(), count.to(total.device).double()
        if not real:
            pair = torch.zeros_like(pair[0]), torch.zeros_like(pair[1])
        before = sums.get(name)
        sums[name] = pair if before is None else (before[0] + pair[0], before[1] + pair[1])


def refuse_other_names(names: tuple[str, ...]) -> None:
    """Sums travel by position, so every rank has to have the same ones."""
    for rank, other in enumerate(gather(names)):
        if other != names:
            raise UsageError(
                f"the step gives {', '.join(names)} on this rank, {', '.join(other)} on rank"
                f" {rank}",
                "give the same metrics everywhere",
            )
