"""The steps since somebody last looked, still on the device: looking makes the host wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepReport:
    """The results of one step, over all ranks, still on the device."""

    step: int
    names: tuple[str, ...]  # "loss" first
    sums: Tensor  # the sum and the count of each name
    grad_norm: Tensor  # of the mean loss, before clipping
    bad: Tensor  # 1.0 where the step was skipped
    bad_in_a_row: Tensor
    apart: Tensor  # 1.0 where the ranks used other parts of the model; then it was skipped, too
    lr: float | Tensor


@dataclass(frozen=True)
class StepResult:
    """The same on the host; of the samples, those of this rank."""

    step: int
    sums: dict[str, tuple[float, float]]
    grad_norm: float
    skipped: bool
    bad_in_a_row: int
    apart: bool
    bad_here: bool  # the NaN or inf was in a loss of this rank
    bad_samples: list[int]  # where they have numbers
    lr: float


@dataclass
class Ledger:
    ids: list[list[int] | None] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)

    def add(self, ids: list[int] | None, loss: Tensor) -> None:
        """Note a micro-batch of this rank."""
        self.ids.append(ids)
        self.losses.append(loss)

    def close(self, report: StepReport) -> None:
        """Note the step that the micro-batches belong to."""
        self.steps.append((report, self.ids, self.losses))
        self.ids, self.losses = [], []

    def read(self) -> Iterator[StepResult]:
        """Wait for the device, once, and give what the steps came to."""
        if not self.steps:
            return
        steps, self.steps = self.steps, []
        rows = [
            torch.cat([torch.stack([r.grad_norm, r.bad, r.bad_in_a_row, r.apart]).double(), r.sums])
            for r, _, _ in steps
        ]
        for (report, ids, losses), row in zip(steps, torch.stack(rows).tolist(), strict=True):
            norm, bad, in_a_row, apart, *sums = row
            finite = torch.stack(losses).isfinite().tolist() if bad and losses else []
            culprits = [own for own, good in zip(ids, finite, strict=False) if not good]
            pairs = zip(sums[::2], sums[1::2], strict=True)
            yield StepResult(
                report.step,
                dict(zip(report.names, pairs, strict=True)),
                norm,
                bool(bad),
                int(in_a_row),
                bool(apart),
                bool(culprits),
                [i for own in culprits for i in own or ()],
                float(report.lr),
            )
