"""Turns losses into sums and counts, never means.

Sums add up exactly over micro-batches, ranks and batches of unequal size; means do not. So a mean
from a user's loss is multiplied by its count. The total is divided once, by the count of all ranks
and micro-batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from orchestrator.common.errors import CheckFailed, UsageError, did_you_mean
from orchestrator.engine.models.import_by_name import kind_of
from orchestrator.engine.models.nested import is_tensor, map_nested

# Maps names to (sum, count), with "loss" first.
Totals = dict[str, tuple[Tensor, Tensor]]


# Computes the sums of a batch from the model, the batch, and the number of its samples.
Loss = Callable[..., Totals]
Step = Callable[[nn.Module, Any], Any]
Criterion = Callable[[Any, Any], Any]

FIX = (
    'Return (loss_sum, count): with reduction="sum" in the loss, and how many it summed. Means'
    " of batches that hold unequally many are not the mean of all of them; the engine divides"
    " once, by the count of all ranks and micro-batches."
)

FIX_OF_STEP = (
    "return a mean over the samples of the batch, or (sum, count), or (sum, count, {name: sum})"
)


class LossSums(NamedTuple):
    """The sums that a model returns for a batch."""

    # The sum over all counted tokens or samples, in fp32 or fp64.
    loss: Tensor
    # The number of tokens or samples.
    count: Tensor  # type: ignore[assignment]
    # Sums of further metrics, such as "correct".
    extra: dict[str, Tensor] = {}  # noqa: RUF012

    def totals(self) -> Totals:
        extra = {name: (value, self.count) for name, value in self.extra.items()}
        return {"loss": (self.loss, self.count), **extra}


def as_sums(result: Any, giver: str) -> LossSums:
    """Return the result of a user's model or loss function as LossSums, or raise CheckFailed."""
    if isinstance(result, LossSums):
        return result
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        what = "one tensor" if isinstance(result, Tensor) else kind_of(result)
        raise CheckFailed(f"{giver} gave {what}, where a sum and a count are needed", FIX)
    loss, count, extra = (*result, {})[:3]
    loss = torch.tensor(float(loss)) if isinstance(loss, Real) else loss
    if not isinstance(loss, Tensor) or loss.dim():
        shape = (
            f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else kind_of(loss)
        )
        raise CheckFailed(f"{giver} gave {shape} as the sum of its losses, not one number", FIX)
    if not isinstance(extra, dict):
        raise CheckFailed(
            f"{giver} gave {kind_of(extra)} after the sum and the count",
            "further metrics are a dict of name: sum",
        )
    refuse_taken_names(extra, giver)
    return LossSums(
        at_least_fp32(loss),
        as_number(count, loss, f"{giver}: the count"),
        {name: as_number(value, loss, f"{giver}: {name!r}") for name, value in extra.items()},
    )


def refuse_taken_names(names: Mapping[str, Any], giver: str) -> None:
    for name in ("loss", "count"):
        if name in names:
            raise UsageError(
                f"{giver} has a metric named {name!r}, which is taken", "give it another name"
            )


def as_number(value: Any, like: Tensor, what: str) -> Tensor:
    if isinstance(value, Tensor) and value.dim() == 0:
        return value
    if not isinstance(value, Real):
        raise CheckFailed(f"{what} is {kind_of(value)}, not one number", FIX)
    # numpy registers its numbers as Integral and Real.
    dtype = torch.int64 if isinstance(value, Integral) else torch.float32
    return torch.tensor(value, dtype=dtype, device=like.device)


# -- a Trainer's loss, step and metrics -----------------------------------------------------------


class Losses:
    """Calls `loss` and `metrics` with (outputs, targets), or `step` with (model, batch)."""

    def __init__(
        self,
        loss: Criterion | None,
        step: Step | None,
        metrics: Mapping[str, Criterion],
        names: Sequence[str] = ("",),
    ) -> None:
        """`names` are the optimizers' names. A single optimizer has an empty name."""
        if "" not in names and step is None:
            raise UsageError(
                "models= needs step=, a function of (models, batch)",
                "it returns a loss for each optimizer, by its name",
            )
        if (loss is None) == (step is None):
            raise UsageError(
                "the Trainer takes either loss= or step=",
                "loss=nn.CrossEntropyLoss() is called with (outputs, targets);"
                " step=function with (model, batch), and returns the loss",
            )
        if step is not None and metrics:
            raise UsageError("metrics= needs loss=; a step returns (sum, count, {name: sum})")
        if getattr(loss, "reduction", "") == "sum":
            raise UsageError(
                'the loss has reduction="sum", which grows with the number of samples and ranks',
                'leave it at "mean", or give a function that returns (sum, count)',
            )
        if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
            raise UsageError(
                f"the loss ({type(loss).__name__}) has weights of its own, which nothing trains",
                "put it into the model, whose forward then gives the loss: step=lambda model,"
                " batch: model(batch)",
            )
        refuse_taken_names(metrics, "metrics=")
        self.loss, self.step, self.metrics = loss, step, dict(metrics)
        self.names = tuple(names)
        # torch divides the means of these by the weights of all targets that are not ignored.
        self.counts = type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss)
        summed: Any = copy.copy(loss)
        if self.counts:
            summed.reduction = "sum"
        self.summed = summed

    def to(self, device: torch.device) -> None:
        """Move a loss with tensors of its own, such as class weights, to the device."""
        if isinstance(self.loss, nn.Module):
            self.loss.to(device)

    def __call__(
        self,
        model: nn.Module,
        batch: Any,
        drawn: int | None = None,
        due: Sequence[str] | None = None,
    ) -> Totals:
        """Return the totals of a batch. `due` names the optimizers that step [default: all]."""
        if self.step is not None:
            names = self.names if due is None else due
            return by_optimizer(names, self.step(model, batch), batch, drawn, self.names)
        inputs, targets = split_batch(batch)
        # Outputs are converted, so that losses are computed in fp32.
        outputs = map_nested(call_model(model, inputs), in_fp32)
        sized_by = targets if isinstance(targets, Tensor) else batch
        if self.counts and not targets.is_floating_point():
            value = self._counted(outputs, targets)
        else:
            assert self.loss is not None
            value = self.loss(outputs, targets)
        result = to_totals("the loss", value, sized_by, drawn)
        for name, metric in self.metrics.items():
            with torch.no_grad():
                value = metric(outputs, targets)
                result[name] = to_totals(f"the metric {name!r}", value, sized_by, drawn)["loss"]
        return result

    def _counted(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum and the count of the loss on the device, so that the host never waits."""
        loss: Any = self.loss
        total = self.summed(outputs, targets)
        counts = targets != loss.ignore_index
        if loss.weight is None:
            return total, counts.sum()
        return total, (loss.weight[targets.where(counts, 0)] * counts).sum()


def to_totals(giver: str, result: Any, batch: Any, drawn: int | None) -> Totals:
    """Return the result of a loss as totals. A mean is multiplied by the samples of its batch."""
    if isinstance(result, Real):
        result = torch.tensor(float(result))
    if isinstance(result, Tensor):
        many = result.numel() if result.dim() else samples_in(batch, drawn)
        total = at_least_fp32(result).sum() * (1 if result.dim() else many)
        return {"loss": (total, as_number(many, result, giver))}
    if not isinstance(result, tuple):
        refuse_no_loss(giver, result)
    return as_sums(result, giver).totals()


def refuse_no_loss(giver: str, result: Any) -> NoReturn:
    """Raise CheckFailed for a result that is no loss: None, or all outputs of a model."""
    inside = isinstance(result, Mapping) and "loss" in result
    fix = f"it has a loss: return that alone; else {FIX_OF_STEP}" if inside else FIX_OF_STEP
    what = "None: it returns nothing" if result is None else f"{kind_of(result)}, which is no loss"
    raise CheckFailed(f"{giver} gave {what}", fix)


def loss_of(name: str) -> str:
    """Return the key of an optimizer's loss in the totals."""
    return f"loss_{name}" if name else "loss"


def by_optimizer(
    names: Sequence[str], result: Any, batch: Any, drawn: int | None, known: Sequence[str]
) -> Totals:
    """Return a step's totals for each optimizer that is due, and their sum as "loss".

    A loss that is a function is called only where its optimizer is due.
    """
    if "" in known or (not isinstance(result, Mapping) and len(known) == 1):
        result = {known[0]: result}
    if "" not in known:
        refuse_other_optimizers(names, result, known)
    given = {name: result[name]() if callable(result[name]) else result[name] for name in names}
    givers = {name: f"the step's loss of {name!r}" if name else "the step" for name in names}
    each = {name: to_totals(givers[name], given[name], batch, drawn) for name in names}
    found: Totals = (
        {} if "" in each else {"loss": add_means([each[name]["loss"] for name in names])}
    )
    for name, own in each.items():
        for key, pair in own.items():
            place = loss_of(name) if key == "loss" else key
            if place in found:
                raise UsageError(
                    f"the step gives the metric {place!r} twice", "give each another name"
                )
            found[place] = pair
    return found


def refuse_other_optimizers(names: Sequence[str], result: Any, known: Sequence[str]) -> None:
    shown = ", ".join(f'"{name}": ...' for name in known)
    fix = f"return {{{shown}}}: a mean, or (sum, count), or (sum, count, {{name: sum}}) for each"
    if not isinstance(result, Mapping):
        what = f"the step gave {kind_of(result)}, where each optimizer needs a loss by its name"
    elif unknown := [name for name in result if name not in known]:
        what = (
            f"the step gives a loss of {unknown[0]!r}, and no optimizer has that name"
            f"{did_you_mean(str(unknown[0]), known)}"
        )
    elif lacking := [name for name in names if result.get(name) is None]:
        what = f"the step gives no loss of {lacking[0]!r}, which is an optimizer"
    else:
        return
    raise UsageError(what, fix)


def add_means(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the sum of several means, as a sum and the first count, for a report."""
    first = pairs[0][1]
    total = sum(
        (value.detach() / count.clamp(min=1e-12) * first for value, count in pairs),
        pairs[0][0].new_zeros(()),
    )
    return total, first


def in_fp32(output: Tensor) -> Tensor:
    return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output


def at_least_fp32(value: Tensor) -> Tensor:
    return value if value.dtype == torch.float64 else value.float()


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and targets of a batch that has exactly these, or raise UsageError."""
    if isinstance(batch, (list, tuple)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, dict) and {"inputs", "targets"} <= batch.keys():
        return batch["inputs"], batch["targets"]
    shape = (
        f"{kind_of(batch)} of {len(batch)}" if isinstance(batch, (list, tuple)) else kind_of(batch)
    )
    if isinstance(batch, dict):
        shape = f"a dict of {', '.join(map(str, batch))}"
    raise UsageError(
        f"a batch is {shape}; with loss= it has to be (inputs, targets), or a dict of both",
        "use step=, a function of (model, batch) that returns the loss",
    )


def call_model(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (list, tuple)) else model(inputs)


def samples_in(batch: Any, drawn: int | None = None) -> int:
    """Return the number of rows that all tensors of a batch have, else `drawn`."""
    parts = batch.values() if isinstance(batch, Mapping) else batch
    parts = [*parts] if isinstance(batch, (list, tuple, Mapping)) else [batch]
    for tensors in (filter(is_tensor, parts), tensors_in(batch)):
        rows = {tensor.shape[0] for tensor in tensors if tensor.dim()}
        if len(rows) == 1:
            return rows.pop()
    if drawn is None:
        raise UsageError(
            "it is not known how many samples a batch has: its tensors have"
            f" {' and '.join(map(str, sorted(rows))) or 'no'} rows",
            "let the step return (sum, count)",
        )
    return drawn


def tensors_in(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
        return
    inner = batch.values() if isinstance(batch, Mapping) else batch
    if hasattr(inner, "__iter__") and not isinstance(inner, (str, bytes, Iterator)):
        for value in inner:
            yield from tensors_in(value)


# -- cross entropy in pieces -----------------------------------------------------------------------


# Marks a target that is not counted, as in torch.
IGNORED = -100


def cross_entropy_sums(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, count_correct: bool
) -> LossSums:
    """Return the cross entropy of a head in sums, computed in chunks of tokens.

    Shapes: hidden (tokens, dim), weight (vocabulary, dim), targets (tokens).
    """
    device = hidden.device.type
    # Autocast does not apply inside of autograd functions.
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    loss, count, correct = HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, chunk, torch.is_grad_enabled(), count_correct
    )
    return LossSums(loss, count, {"correct": correct} if count_correct else {})


class HeadLoss(torch.autograd.Function):
    """Cross entropy in chunks, which computes the gradients in forward.

    A chunk's logits exist only once. That takes three multiplications with the head's weight,
    where recomputing the logits in backward takes four.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        training: bool,
        count_correct: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        loss = hidden.new_zeros((), dtype=torch.float32)
        count = correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        for_hidden = torch.empty_like(hidden) if training else None
        # In bf16, the small addends of later chunks would be rounded away, so the sum is in fp32.
        for_weight = torch.zeros_like(weight, dtype=torch.float32) if training else None
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            kept, target = hidden[rows], targets[rows]
            counted = target != IGNORED
            target = target.where(counted, 0)[:, None]
            logits = kept @ weight.T
            if count_correct:
                correct = correct + ((logits.argmax(1) == target[:, 0]) & counted).sum()
            log = torch.log_softmax(logits, 1, dtype=torch.float32)
            del logits
            loss -= log.gather(1, target)[:, 0].where(counted, 0).sum()
            count = count + counted.sum()
            if for_hidden is None or for_weight is None:
                continue
            slope = log.exp_().scatter_add_(1, target, torch.full_like(log[:, :1], -1))
            slope = slope.to(weight.dtype)
            # Ignored targets have no gradient. Zeroing is cheap here: rows are `dim` wide.
            for_hidden[rows] = (slope @ weight).where(counted[:, None], 0)
            for_weight += slope.T @ kept.where(counted[:, None], 0)
        if for_hidden is not None and for_weight is not None:
            ctx.save_for_backward(for_hidden, for_weight.to(weight.dtype))
        ctx.mark_non_differentiable(count, correct)
        return loss, count, correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        for_hidden, for_weight = ctx.saved_tensors
        return (for_hidden * scale).to(for_hidden.dtype), for_weight * scale, None, None, None, None
