"""From a user's loss and metrics to sums and counts. Called by trainer.py.

Users write means. A mean of means is wrong as soon as two batches hold unequally many, so each is
taken back to what it is the mean of, and divided once, over all ranks and micro-batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.engine.models.import_by_name import kind
from orchestrator.engine.models.loss_sums import as_sums, number
from orchestrator.errors import UsageError

Totals = dict[str, tuple[Tensor, Tensor]]  # name -> (sum, count), "loss" first
Step = Callable[[nn.Module, Any], Any]
Criterion = Callable[[Any, Any], Any]


class Losses:
    """`loss` and `metrics` are called with (outputs, targets), `step` with (model, batch)."""

    def __init__(
        self, loss: Criterion | None, step: Step | None, metrics: Mapping[str, Criterion]
    ) -> None:
        if (loss is None) == (step is None):
            raise UsageError(
                "the Trainer takes either loss= or step=",
                "loss=nn.CrossEntropyLoss() is called with (outputs, targets);"
                " step=function with (model, batch), and returns the loss",
            )
        if step is not None and metrics:
            raise UsageError("metrics= goes with loss=; a step returns (sum, count, {name: sum})")
        if getattr(loss, "reduction", "") == "sum":
            raise UsageError(
                'the loss has reduction="sum", which grows with the number of samples and ranks',
                'leave it at "mean", or give a function that returns (sum, count)',
            )
        self.loss, self.step, self.metrics = loss, step, dict(metrics)
        # Of these torch knows what a mean is divided by: targets that count, times their weights.
        self.counts = type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss)

    def __call__(self, model: nn.Module, batch: Any) -> Totals:
        if self.step is not None:
            return totals("the step", self.step(model, batch), size_of(batch))
        inputs, targets = halves(batch)
        outputs = call(model, inputs)
        if isinstance(outputs, Tensor) and outputs.dtype in (torch.bfloat16, torch.float16):
            outputs = outputs.float()
        size = size_of(targets if isinstance(targets, Tensor) else batch)
        if self.counts and not targets.is_floating_point():
            found = totals("the loss", self._counted(outputs, targets), size)
        else:
            assert self.loss is not None
            found = totals("the loss", self.loss(outputs, targets), size)
        with torch.no_grad():
            for name, metric in self.metrics.items():
                value = metric(outputs, targets)
                found[name] = totals(f"the metric {name!r}", value, size)["loss"]
        return found

    def _counted(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        adding: Any = copy.copy(self.loss)
        adding.reduction = "sum"
        kept = targets[targets != adding.ignore_index]
        count = kept.new_tensor(kept.numel()) if adding.weight is None else (
            adding.weight[kept].sum())  # fmt: skip
        return adding(outputs, targets), count


def totals(giver: str, found: Any, size: int) -> Totals:
    if isinstance(found, (int, float)):
        found = torch.tensor(float(found))
    if isinstance(found, Tensor) and found.dim():
        return {"loss": (found.float().sum(), number(found.numel(), found, giver))}
    if isinstance(found, Tensor):
        return {"loss": (found.float() * size, number(size, found, giver))}
    sums = as_sums(found, giver)
    extra = {name: (value, sums.count) for name, value in sums.extra.items()}
    return {"loss": (sums.loss, sums.count), **extra}


def halves(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, (list, tuple)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, dict) and {"inputs", "targets"} <= batch.keys():
        return batch["inputs"], batch["targets"]
    shape = f"{kind(batch)} of {len(batch)}" if isinstance(batch, (list, tuple)) else kind(batch)
    if isinstance(batch, dict):
        shape = f"a dict of {', '.join(map(str, batch))}"
    raise UsageError(
        f"a batch is {shape}; with loss= it has to be (inputs, targets), or a dict of both",
        "use step=, a function of (model, batch) that returns the loss",
    )


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (list, tuple)) else model(inputs)


def size_of(batch: Any) -> int:
    """How many samples: the first dimension of the first tensor in it."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    for inner in batch.values() if isinstance(batch, Mapping) else batch:
        if isinstance(inner, (Tensor, Mapping, list, tuple)):
            return size_of(inner)
    raise UsageError(
        "a batch holds no tensor, so nobody knows how many samples it has",
        "let the step return (sum, count)",
    )
