"""What a model gives for a batch: sums and a count, never a mean. Called by the models.

Sums add up exactly over micro-batches, ranks and batches of unequal size; means do not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from orchestrator.engine.models.import_by_name import kind
from orchestrator.errors import CheckFailed


class Sums(NamedTuple):
    loss: Tensor  # the sum over all that was counted, in fp32
    count: Tensor  # type: ignore[assignment]  # how many: tokens, or samples
    extra: dict[str, Tensor] = {}  # noqa: RUF012  sums of further metrics, such as "correct"


FIX = (
    'Return (loss_sum, count): with reduction="sum" in the loss, and how many it summed. Means'
    " of batches that hold unequally many are not the mean of all of them; the engine divides"
    " once, by the count of all ranks and micro-batches."
)


def as_sums(found: Any, giver: str) -> Sums:
    """What a model or loss function of the user's gave, as Sums."""
    if isinstance(found, Sums):
        return found
    if isinstance(found, Tensor):
        raise CheckFailed(f"{giver} gave one tensor, where a sum and a count are needed", FIX)
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise CheckFailed(f"{giver} gave {kind(found)}, where a sum and a count are needed", FIX)
    loss, count = found[:2]
    extra = found[2] if len(found) == 3 else {}
    if not isinstance(loss, Tensor) or loss.dim():
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else kind(loss)
        raise CheckFailed(f"{giver} gave {shape} as the sum of its losses, not one number", FIX)
    if not isinstance(extra, dict):
        raise CheckFailed(
            f"{giver} gave {kind(extra)} after the sum and the count",
            "further metrics are a dict of name: sum",
        )
    return Sums(
        loss.float(),
        number(count, loss, f"{giver}: the count"),
        {name: number(value, loss, f"{giver}: {name!r}") for name, value in extra.items()},
    )


def number(value: Any, beside: Tensor, what: str) -> Tensor:
    if isinstance(value, Tensor) and value.dim() == 0:
        return value
    if isinstance(value, (int, float)):
        kept = torch.int64 if isinstance(value, int) else torch.float32
        return torch.full((), value, dtype=kept, device=beside.device)
    raise CheckFailed(f"{what} is {kind(value)}, not one number", FIX)
