"""The head and the loss of a language model in one, a chunk of tokens at a time.

All logits at once are the largest tensor of a training step: 32k tokens of a vocabulary of 128k
are 17 GB in fp32, and as much again for their gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orchestrator.engine.models.losses import Sums

IGNORED = -100  # a target that is not counted, as in torch


def summed(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, count_correct: bool
) -> Sums:
    """hidden (tokens, dim), weight (vocabulary, dim), targets (tokens)."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # it does not look into autograd functions
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    loss, count, correct = HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, chunk, torch.is_grad_enabled(), count_correct
    )
    return Sums(loss, count, {"correct": correct} if count_correct else {})


class HeadLoss(torch.autograd.Function):
    """The gradients are computed with the loss, while a chunk's logits are there: three
    multiplications with the head's weight instead of the four of recomputing in backward."""

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
        # Summed in fp32: in bf16, what a later chunk adds to a large sum is rounded away.
        for_weight = torch.zeros_like(weight, dtype=torch.float32) if training else None
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            own, target = hidden[rows], targets[rows]
            counted = target != IGNORED
            target = target.where(counted, 0)[:, None]
            logits = own @ weight.T
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
            # Nothing comes from what is not counted: dropped here, where a row has `dim` numbers.
            for_hidden[rows] = (slope @ weight).where(counted[:, None], 0)
            for_weight += slope.T @ own.where(counted[:, None], 0)
        if for_hidden is not None and for_weight is not None:
            ctx.save_for_backward(for_hidden, for_weight.to(weight.dtype))
        ctx.mark_non_differentiable(count, correct)
        return loss, count, correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        for_hidden, for_weight = ctx.saved_tensors
        return (for_hidden * scale).to(for_hidden.dtype), for_weight * scale, None, None, None, None
