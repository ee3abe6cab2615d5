"""The outputs of a model for all samples, in the order of the loader, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from orchestrator.common.errors import UsageError
from orchestrator.engine.core.parts import Parts
from orchestrator.engine.data.batch import Micro, to_device
from orchestrator.engine.data.sharded_loader import Shard
from orchestrator.engine.models.losses import call, inputs_of
from orchestrator.engine.ranks.collectives import gather_tensors
from orchestrator.engine.ranks.ranks import gather
from orchestrator.engine.sharding import mesh

Forward = Callable[[nn.Module, Any], Any]
FIX = "give output=, a function of (model, batch) that returns tensors with a row for each sample"


def forward(model: nn.Module, batch: Any) -> Any:
    """Call the model with the inputs of a batch, or with all of it, where it has no targets."""
    return call(model, inputs_of(batch))


def predict(parts: Parts, batches: Shard, output: Forward) -> Any:
    """Compute this rank's share of the outputs, and put all shares together in host memory."""
    rows: list[int] = []  # of this rank, by batch
    leaves: list[list[Tensor]] = []
    spec: Any = None
    with mesh.evaluating(parts.model), torch.no_grad():
        for micro in batches.epoch(0):
            batch = to_device(micro.data, parts.ranks.device)
            with mesh.computing(parts.mesh, parts.ranks, parts.config):
                result = mesh.as_forward(parts.model, lambda model: output(model, batch))  # noqa: B023
            own, spec = tree.tree_flatten(result)
            count = rows_of(own, micro)
            rows.append(count if micro.real else 0)
            leaves.append([leaf[: rows[-1]].to("cpu", copy=True) for leaf in own])
    order = in_order(gather_tensors(torch.tensor(rows)), interleaved=batches.interleaved)
    return tree.tree_unflatten(
        [together(list(own), order) for own in zip(*leaves, strict=True)], spec
    )


def rows_of(leaves: list[Any], micro: Micro) -> int:
    """Count the samples of an output, and refuse what has none of its own for each sample."""
    counts = {leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves}
    count = next(iter(counts), None)
    if len(counts) != 1 or count is None:
        raise UsageError("the model's outputs are not tensors with a row for each sample", FIX)
    if micro.ids is not None and len(micro.ids) != count:
        raise UsageError(f"the model gives {count} rows for {len(micro.ids)} samples", FIX)
    return count


def together(own: list[Tensor], order: Tensor) -> Tensor:
    problem = ""
    mine = own[0][:0]
    try:
        mine = torch.cat(own)
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
    """Give, in the order of the loader, the places of all rows where each rank's follow each other.

    `rows` has for each rank how many each of its batches has. Interleaved: the n-th rows of all
    ranks' batches follow each other; otherwise whole batches do.
    """
    keys = []
    for rank, counts in enumerate(rows):
        batch = torch.repeat_interleave(torch.arange(len(counts)), counts)
        starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        row = torch.arange(len(batch)) - starts
        own = torch.full_like(row, rank)
        keys.append(torch.stack([batch, row, own] if interleaved else [batch, own, row]))
    batch, first, second = torch.cat(keys, dim=1)
    order = torch.argsort(second, stable=True)
    order = order[torch.argsort(first[order], stable=True)]
    return order[torch.argsort(batch[order], stable=True)]
