"""What a run writes, says and watches beside the training itself. Called by train.py."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.config.schema import Config
from orchestrator.engine.core import stop_vote
from orchestrator.engine.core.optim import Report
from orchestrator.engine.models import build
from orchestrator.engine.observe import metrics, speed
from orchestrator.engine.ranks import mesh
from orchestrator.engine.ranks.mesh import Mesh
from orchestrator.engine.ranks.ranks import Ranks
from orchestrator.errors import JobFailed


@dataclass
class Ledger:
    """The steps since somebody last looked, still on the device: looking makes the host wait."""

    ids: list[list[int]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    steps: list[tuple[int, float, Report, list[list[int]], list[Tensor]]] = field(
        default_factory=list
    )

    def add(self, ids: list[int], loss: Tensor) -> None:
        self.ids.append(ids)
        self.losses.append(loss)

    def close(self, step: int, report: Report, lr: float) -> None:
        self.steps.append((step, lr, report, self.ids, self.losses))
        self.ids, self.losses = [], []

    def read(self) -> Iterator[tuple[int, float, list[float], list[int]]]:
        """(step, lr, [loss, norm, count, bad, bad in a row], this rank's samples that were bad)."""
        if not self.steps:
            return
        rows = [
            torch.stack([r.loss, r.grad_norm, r.count, r.bad, r.bad_in_a_row]).double()
            for _, _, r, _, _ in self.steps
        ]
        for (step, lr, _, ids, losses), row in zip(
            self.steps, torch.stack(rows).tolist(), strict=True
        ):
            bad: list[int] = []
            if row[3]:
                finite = torch.stack(losses).isfinite().tolist()
                bad = [i for own, good in zip(ids, finite, strict=True) if not good for i in own]
            yield step, lr, row, bad
        self.steps = []


class Run:
    """What a run writes, says and watches beside the training itself."""

    def __init__(
        self, config: Config, ranks: Ranks, model: nn.Module, step: int, tokens: int, per_step: int
    ) -> None:
        self.config, self.ranks, self.per_step = config, ranks, per_step
        self.ending = ""  # why, once it is known that this step is the last
        self.tokens = tokens
        self.skipped = 0
        self.asked = stop_vote.Agreement()
        self.phases = metrics.Phases(ranks.device, model)
        self.ledger = Ledger()
        self.file = metrics.MetricsFile(ranks.rank, step)
        self.estimate = metrics.Estimate(config.training.max_steps)
        self.flops = build.flops_per_sample(config, mesh.bare(model))
        self.peak: float | None = None
        self.measured: float | None = None
        if self.flops:
            dtype = speed.matmul_dtype(config.training.mixed_precision)
            self.peak = speed.peak_flops(mesh.kind_of(ranks.device), dtype)
            self.measured = speed.measured_matmul_flops(ranks.device, dtype)
        self.began = self.saved_at = self.evaluated_at = time.monotonic()
        self.busy = 0.0  # seconds in steps since the last line, without pauses
        self.logged_step = step
        run, local = os.environ.get("ORCHESTRATOR_RUN"), os.environ.get("LOCAL_RANK", "0")
        self.sign = Path(run, f"step_{local}") if run else None
        self.latest: dict[str, Any] = {}

    def after(self, step: int, *, stop: bool, out_of_time: bool) -> None:
        """After every step: look at the clock, and at the numbers when it is time to."""
        self.goes_on()
        training, saving = self.config.training, self.config.checkpoint
        now = time.monotonic()
        self.busy += self.estimate.step(step)
        if self.ranks.rank == 0:
            if training.max_minutes and now - self.began > training.max_minutes * 60:
                self.asked.ask(stop_vote.TIME)
            if saving.seconds and now - self.saved_at > saving.seconds:
                self.saved_at = now
                self.asked.ask(stop_vote.SAVE)
            if training.eval_seconds and now - self.evaluated_at > training.eval_seconds:
                self.evaluated_at = now
                self.asked.ask(stop_vote.EVALUATE)
        if stop:
            self.ending = "asked to stop"
        elif out_of_time:
            self.ending = f"training.max_minutes ({training.max_minutes:g}) are over"
        shown = due(self.config.logging.interval, step) or step == training.max_steps
        if shown or self.ending or self.logged_step == 0:
            self.log(step)
        elif len(self.ledger.steps) >= training.max_bad_steps:
            self.flush()

    def goes_on(self) -> None:
        """A sign for those who watch whether the job does, however seldom it prints."""
        if self.sign is not None:
            self.sign.touch()

    def flush(self) -> None:
        """Read what the steps came to: the one place where the host waits for the device."""
        for step, lr, row, bad in self.ledger.read():
            loss, norm, count, skipped, in_a_row = row
            self.tokens += int(count)
            self.latest = {"step": step, "loss": loss, "lr": lr, "grad_norm": norm}
            if skipped:
                self.skipped += 1
                if bad:
                    tell(f"step {step} is skipped on all ranks: NaN or inf in samples {bad[:16]}")
                elif self.config.training.mixed_precision == "fp16":
                    self.say(f"step {step} is skipped: fp16 overflowed, the loss's scale is halved")
                else:
                    self.say(f"step {step} is skipped on all ranks: NaN or inf in the gradients")
            if in_a_row >= self.config.training.max_bad_steps:
                raise JobFailed(
                    f"{in_a_row:.0f} steps in a row had NaN or inf, the last was step {step}",
                    "look at the samples named above, or try a smaller optimizer.lr",
                )

    def log(self, step: int) -> None:
        before = self.tokens
        self.flush()
        seconds, steps = self.busy, step - self.logged_step
        tokens_per_s = (self.tokens - before) / seconds
        memory, peak = metrics.memory(self.ranks.device)
        record = {
            **self.latest,
            "tokens": self.tokens,
            "tokens_per_s": tokens_per_s,
            "step_ms": seconds / steps * 1e3,
            **self.phases.flush(steps),
            "memory_bytes": memory,
            "memory_peak_bytes": peak,
            **self.utilization(steps * self.per_step / self.ranks.world / seconds),
            "skipped_steps": self.skipped,
        }
        self.file.write(record)
        left = self.estimate.seconds() if not self.ending else None
        self.say(metrics.progress(record, self.config.training.max_steps, left))
        self.busy, self.logged_step = 0.0, step

    def utilization(self, samples_per_s: float) -> dict[str, float | None]:
        """Of what the vendor promises, and of what a large multiplication reaches here."""
        if not self.flops:
            return {"mfu": None, "mfu_measured": None}
        used = self.flops * samples_per_s
        return {"mfu": speed.mfu(used, self.peak), "mfu_measured": speed.mfu(used, self.measured)}

    def say_evaluation(self, step: int, found: dict[str, float] | None) -> None:
        if found is None:
            return
        self.file.write({"step": step, **{f"eval_{name}": value for name, value in found.items()}})
        words = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
        self.say(f"held out after step {step}: {words}")

    def end(self, step: int) -> None:
        if self.ending:
            self.say(f"{self.ending}: all ranks end together after step {step}")

    def say(self, text: str) -> None:
        say(self.ranks, text)


def announce(config: Config, ranks: Ranks, shape: Mesh, model: nn.Module, samples: int) -> None:
    """Who is there, which ranks share what, and how much there is to do."""
    for line in mesh.picture(shape, ranks):
        say(ranks, line)
    own = ranks.of_node(ranks.nodes[ranks.rank][0])
    if ranks.world > 1 and ranks.rank == own[0]:
        host = f"{ranks.nodes[ranks.rank][1]}, {mesh.kind_of(ranks.device)}"
        tell(f"ranks {own[0]} to {own[-1]} of {ranks.world} are here: {host}")
    training = config.training
    parameters = sum(weight.numel() for weight in model.parameters())
    say(
        ranks,
        f"{parameters:,} parameters; {training.max_steps} steps of {ranks.world} ranks x"
        f" {training.gradient_accumulation} micro-batches x {training.batch_size} samples, out of"
        f" {samples:,}",
    )


def say(ranks: Ranks, text: str) -> None:
    """What one rank says for all."""
    if ranks.rank == 0:
        tell(text)


def due(every: int | None, step: int) -> bool:
    return bool(every) and step % (every or 1) == 0


def tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
