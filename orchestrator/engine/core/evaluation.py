"""Evaluate a model over all ranks: the means of losses and metrics, or the outputs themselves."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.common.errors import UsageError
from orchestrator.engine.core.parts import Parts
from orchestrator.engine.core.stopping import Metrics
from orchestrator.engine.data.batch import Batches, Micro, to_device
from orchestrator.engine.data.sharded_loader import Shard
from orchestrator.engine.models.losses import Totals, call, inputs_of
from orchestrator.engine.models.nested import mapped
from orchestrator.engine.ranks.collectives import gather_tensors
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


# -- the outputs for all samples -------------------------------------------------------------------


Forward = Callable[[nn.Module, Any], Any]
FIX = "give output=, a function of (model, batch) that returns tensors with a row for each sample"


def forward(model: nn.Module, batch: Any) -> Any:
    """Call the model with the inputs of a batch, or with all of it, where it has no targets."""
    try:
        return call(model, inputs_of(batch))
    except NotImplementedError as error:  # of a ModuleDict, or another without a forward
        raise UsageError(f"the model cannot be called: {error}", FIX) from error


def predict(parts: Parts, batches: Shard, output: Forward) -> Any:
    """Compute this rank's share of the outputs, and put all shares together in host memory."""
    rows: list[int] = []  # of this rank, by batch
    leaves: list[list[Tensor]] = []
    low = parts.config.training.mixed_precision
    result: Any = None
    with parts.steppers.evaluating(), mesh.evaluating(parts.model), torch.no_grad():
        for micro in batches.epoch(0):
            batch = to_device(micro.data, parts.ranks.device)
            with low_precision.computing(low, parts.ranks.device):
                result = mesh.as_forward(parts.model, lambda model: output(model, batch))  # noqa: B023
            leaves_here: list[Any] = []
            mapped(result, leaves_here.append, is_leaf)
            count = rows_of(leaves_here, micro)
            rows.append(count if micro.real else 0)
            leaves.append([leaf[: rows[-1]].to("cpu", copy=True) for leaf in leaves_here])
    order = in_order(gather_tensors(torch.tensor(rows)), interleaved=batches.interleaved)
    whole = iter([together(list(of_batches), order) for of_batches in zip(*leaves, strict=True)])
    return mapped(result, lambda _: next(whole), is_leaf)


def is_leaf(value: Any) -> bool:
    return not (isinstance(value, (Mapping, list, tuple)) or dataclasses.is_dataclass(value))


def rows_of(leaves: list[Any], micro: Micro) -> int:
    """Count the samples of an output, and refuse what has none of its own for each sample."""
    counts = {leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves}
    count = next(iter(counts), None)
    if len(counts) != 1 or count is None:
        raise UsageError("the model's outputs are not tensors with a row for each sample", FIX)
    if micro.ids is not None and len(micro.ids) != count:
        raise UsageError(f"the model gives {count} rows for {len(micro.ids)} samples", FIX)
    return count


def together(batches: list[Tensor], order: Tensor) -> Tensor:
    problem = ""
    mine = batches[0][:0]
    try:
        mine = torch.cat(batches)
    except RuntimeError as error:  # rows of different lengths
        problem = str(error)
    problems = gather(problem or f"each row is {tuple(mine.shape[1:])}")
    if problem or len(set(problems)) > 1:
        raise UsageError(
            "the outputs of different batches do not have one shape: "
            + "; ".join(dict.fromkeys(problems)),
            "pad them to one length in output=, a function of (model, batch)",
        )
    return torch.cat(gather_tensors(mine))[order]


def in_order(rows: list[Tensor], *, interleaved: bool) -> Tensor:
    """Return the places of all rows in the order of the loader; each rank's follow each other.

    `rows` has for each rank how many each of its batches has. Interleaved: the n-th rows of all
    ranks' batches follow each other; otherwise whole batches do.
    """
    keys = []
    for rank, counts in enumerate(rows):
        batch = torch.repeat_interleave(torch.arange(len(counts)), counts)
        starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        row = torch.arange(len(batch)) - starts
        rank_of = torch.full_like(row, rank)
        keys.append(torch.stack([batch, row, rank_of] if interleaved else [batch, rank_of, row]))
    batch, first, second = torch.cat(keys, dim=1)
    order = torch.argsort(second, stable=True)
    order = order[torch.argsort(first[order], stable=True)]
    return order[torch.argsort(batch[order], stable=True)]
