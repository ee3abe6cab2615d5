"""Report the steps, metrics and epochs of a training on screen, in files and to trackers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.common.errors import JobFailed
from orchestrator.config.schema import Config
from orchestrator.engine.observe import metrics, speed
from orchestrator.engine.observe.phases import Phases
from orchestrator.engine.observe.trackers import Trackers
from orchestrator.engine.ranks.ranks import Ranks, device_name, say_once
from orchestrator.engine.sharding.blocks import OTHER_PARTS
from orchestrator.trackers.known import Tracker


@dataclass(frozen=True)
class StepReport:
    """The results of one step over all ranks, still on the device."""

    step: int
    # "loss" is the first name.
    names: tuple[str, ...]
    # The sum and the count of each name.
    total: Tensor
    # grad_norm: the norm of the mean loss's gradient before clipping; bad: 1.0 if the step was
    # skipped; apart: 1.0 if the ranks used different parts of the model; scale: the loss scale in
    # fp16; lr. Several optimizers add grad_norm_NAME, lr_NAME and bad_NAME.
    numbers: Mapping[str, float | Tensor | None]


@dataclass(frozen=True)
class StepResult:
    """The results of one step on the host, with this rank's bad batches."""

    step: int
    sums: dict[str, tuple[float, float]]
    numbers: dict[str, float]
    # The number of consecutive bad steps, without those that a lower loss scale can cure.
    in_a_row: int
    # The sample numbers of this rank's batches with NaN or inf.
    culprits: list[list[int] | None]

    @property
    def skipped(self) -> bool:
        return bool(self.numbers["bad"])

    @property
    def of_optimizers(self) -> dict[str, float]:
        return {name: v for name, v in self.numbers.items() if name.startswith(SHOWN_OF_EACH)}


# The prefix of numbers that tell whether an optimizer's step was skipped.
BAD = "bad_"
SHOWN_OF_EACH = ("lr_", "grad_norm_")


def on_host(values: Sequence[Tensor | float | None]) -> list[float]:
    """Return numbers as floats, reading all those on a device at once; None becomes zero."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(read) if isinstance(value, Tensor) else value or 0.0 for value in values]


class Ledger:
    """Keeps the results of steps on the device until they are read."""

    def __init__(self) -> None:
        # The sample numbers and the loss of each micro-batch.
        self.micros: list[tuple[list[int] | None, Tensor]] = []
        self.steps: list[tuple[StepReport, list[tuple[list[int] | None, Tensor]]]] = []
        self.in_a_row = 0

    def close(self, report: StepReport) -> None:
        """Add the report of a step, with the micro-batches since the step before."""
        self.steps.append((report, self.micros))
        self.micros = []

    def read(self) -> Iterator[StepResult]:
        """Wait for the device once, and yield the results of all steps since the last call."""
        steps, self.steps = self.steps, []
        if not steps:
            return
        totals = iter(torch.cat([report.total for report, _ in steps]).tolist())
        read = iter(on_host([value for report, _ in steps for value in report.numbers.values()]))
        for report, micros in steps:
            numbers = dict(zip(report.numbers, read, strict=False))
            sums = {name: (next(totals), next(totals)) for name in report.names}
            bad, lost = numbers["bad"], numbers["bad"] and sums["loss"][1]
            # A step without targets loses nothing. An overflow in fp16 only means that the scale is
            # too large, as long as it can still be halved.
            curable = lost and numbers["scale"] > 1.0
            self.in_a_row = self.in_a_row + bool(lost) if bad and not curable else 0
            culprits = [ids for ids, loss in micros if bad and not loss.isfinite()]
            yield StepResult(report.step, sums, numbers, self.in_a_row, culprits)


# What a tracker draws no curve of.
NO_CURVE = ("step", "steps", "left_s")
# Every line has these keys, so a metric of such a name is left out.
RESERVED = ("time", "rank", "step", "epoch")


class Reporter:
    """Logs the steps of one train() call. It waits for the device only when it reports."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        model: nn.Module,
        reporting: Reporting,
        *,
        step: int,
        tokens: int,
        # The unit that the loss counts: tokens, targets or samples.
        unit: str,
        # The number of this Trainer in its program.
        trainer: int,
        # These are None if unknown. The FLOPs are those of this rank, forward and backward.
        max_steps: int | None,
        flops_per_step: float | None,
        # Returns the steps and the seconds that limits leave, or None where there is no limit.
        left: Callable[[], tuple[int | None, float | None]],
    ) -> None:
        self.config, self.ranks, self.unit, self.max_steps = config, ranks, unit, max_steps
        self.say, self.trackers, self.left = reporting.say, reporting.trackers, left
        self.tokens, self.skipped = tokens, 0
        self.phases = Phases(ranks.device, model)
        self.account, self.data_counted = metrics.account_of_process(), 0.0
        self.account.begin(step)
        self.ledger = Ledger()
        self.file = metrics.MetricsFile(ranks.rank, step, trainer, unit)
        self.estimate = metrics.Estimate()
        # The sum and the count of each name.
        self.epoch_sums: dict[str, list[float]] = {}
        self.flops_per_step = flops_per_step
        self.peak = self.measured = None
        if flops_per_step:
            dtype = speed.matmul_dtype(config.training.mixed_precision)
            self.peak = speed.peak_flops(device_name(ranks.device), dtype)
            self.measured = speed.measured_matmul_flops(ranks.device, dtype)
        # The seconds in steps since the last line, without pauses.
        self.busy = 0.0
        self.logged_step, self.logged_tokens = step, tokens
        # True once the first step of the run was logged.
        self.begun = False
        self.latest: StepResult | None = None
        # The newest learning rate and norm of each of several optimizers.
        self.of_optimizers: dict[str, float] = {}
        # The sum and count of each name in the latest step that had it.
        self.seen: dict[str, tuple[float, float]] = {}
        run, local = os.environ.get("ORCHESTRATOR_RUN"), os.environ.get("LOCAL_RANK", "0")
        self.sign = Path(run, f"step_{local}") if run else None

    # -- after every step -------------------------------------------------------------------------

    def alive(self) -> None:
        """Touch this rank's heartbeat file, which shows progress even if nothing is printed."""
        if self.sign is not None:
            self.sign.touch()

    def after_step(self, step: int, epoch: int, *, last: bool) -> None:
        self.alive()
        self.busy += self.estimate.step()
        data = self.phases.data_seconds()
        self.account.after_step(step, data - self.data_counted)
        self.data_counted = data
        if step % self.config.logging.interval == 0 or last or not self.begun:
            self.log(step, epoch, last=last)
        elif len(self.ledger.steps) >= self.config.training.max_bad_steps:
            self.flush()

    def flush(self) -> None:
        """Read the results of the steps since the last flush, and report skipped ones.

        Only here does the host wait for the device. Raises JobFailed after too many bad steps.
        """
        for result in self.ledger.read():
            self.latest = result
            self.of_optimizers |= result.of_optimizers
            several = bool(result.of_optimizers)
            self.seen |= {n: p for n, p in result.sums.items() if p[1] or not several}
            if result.numbers["apart"]:
                raise JobFailed(
                    "the ranks used other parts of the model than each other in step"
                    f" {result.step}, which was not taken",
                    OTHER_PARTS,
                )
            self.tokens += int(result.sums["loss"][1])
            if result.skipped:
                self._say_skipped(result)
            else:
                add_sums(self.epoch_sums, result.sums)
            if result.in_a_row >= self.config.training.max_bad_steps:
                raise JobFailed(
                    f"{result.in_a_row} steps in a row had NaN or inf, the last was step"
                    f" {result.step}",
                    "look at the samples named above, or try a smaller learning rate"
                    " (optimizer.lr), or a warmup",
                )

    def _say_skipped(self, result: StepResult) -> None:
        self.skipped += 1
        bad = [name for name, value in result.numbers.items() if name.startswith(BAD) and value]
        which = ", ".join(name.removeprefix(BAD) for name in bad)
        step = f"step {result.step}{f' of {which}' if which else ''} is skipped"
        samples = [number for ids in result.culprits for number in ids or ()]
        if not result.sums["loss"][1]:
            self.say(f"{step}: none of its targets counts")
        elif samples:
            say_once(f"{step} on all ranks: NaN or inf in samples {samples[:16]}")
        elif result.culprits:
            say_once(f"{step} on all ranks: NaN or inf in the loss of rank {self.ranks.rank}")
        elif self.config.training.mixed_precision == "fp16":
            self.say(f"{step}: fp16 overflowed, the loss's scale is halved")
        else:
            self.say(f"{step} on all ranks: NaN or inf in the loss or the gradients")

    def log(self, step: int, epoch: int, *, last: bool) -> None:
        self.flush()
        assert self.latest is not None
        seconds, steps = self.busy, step - self.logged_step
        memory, peak = metrics.memory_bytes(self.ranks.device)
        means = means_of({**self.latest.sums, **self.seen})
        flops = self.flops_per_step and self.flops_per_step * steps / seconds
        steps_left, clock = self.left()
        known = [s for s in (self.estimate.seconds(steps_left), clock) if s is not None]
        left = None if last else min(known, default=None)
        record: dict[str, float | None] = {
            "step": step,
            "steps": self.max_steps,
            "left_s": left and round(left, 1),
            "epoch": epoch,
            **{name: value for name, value in means.items() if name not in RESERVED},
            "lr": self.latest.numbers["lr"],
            "grad_norm": self.latest.numbers["grad_norm"],
            **self.of_optimizers,
            "tokens": self.tokens,
            "tokens_per_s": (self.tokens - self.logged_tokens) / seconds,
            "step_ms": seconds / steps * 1e3,
            **self.phases.flush(steps),
            "memory_bytes": memory,
            "memory_peak_bytes": peak,
            "mfu": flops and self.peak and flops / self.peak,
            "mfu_measured": flops and self.measured and flops / self.measured,
            "skipped_steps": self.skipped,
        }
        self._write(record)
        others = {name: value for name, value in means.items() if name != "loss"}
        self.say(
            metrics.progress_line(record, self.max_steps, left, unit=self.unit, metrics=others)
        )
        self.busy, self.logged_step, self.begun = 0.0, step, True
        self.logged_tokens = self.tokens

    # -- evaluations and epochs -------------------------------------------------------------------

    def evaluation(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        named = {f"eval_{name}": value for name, value in values.items()}
        self._write({"step": step, "epoch": epoch, **named})
        text = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        self.say(f"held out after step {step}: {text}")

    def epoch(self, step: int, epoch: int, values: Mapping[str, float], *, whole: bool) -> None:
        self._write({"step": step, "epoch": epoch, **values})
        text = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        self.say(f"epoch {epoch}{'' if whole else ' and a part'}  {text}")

    def saves(self, step: int, done: list[tuple[int, int, float]]) -> None:
        """Write a line for each checkpoint that is complete now; pruning removes no line."""
        for saved, size, seconds in done:
            record = {"step": step, "saved_step": saved, "saved_bytes": size}
            self.file.write({**record, "saved_s": round(seconds, 3)})
        done.clear()

    def _write(self, record: Mapping[str, float | None]) -> None:
        self.file.write(record)
        shown = {k: v for k, v in record.items() if k not in NO_CURVE and v is not None}
        self.trackers.log(shown, int(record["step"] or 0))


def add_sums(to: dict[str, list[float]], sums: Mapping[str, tuple[float, float]]) -> None:
    for name, (total, count) in sums.items():
        before = to.setdefault(name, [0.0, 0.0])
        to[name] = [before[0] + total, before[1] + count]


def means_of(sums: Mapping[str, tuple[float, float] | list[float]]) -> dict[str, float]:
    return {name: total / count if count else math.nan for name, (total, count) in sums.items()}


def say_from_rank_0(ranks: Ranks, text: str) -> None:
    """Print a line once, from rank 0."""
    if ranks.rank == 0:
        say_once(text)


class Reporting:
    """Prints lines unless `quiet` is set, and holds the trackers."""

    def __init__(self, ranks: Ranks, trackers: Sequence[str | Tracker] | Mapping[str, Any]) -> None:
        self.ranks, self.quiet = ranks, False
        self.trackers = Trackers(trackers, ranks, self.say)

    def say(self, text: str) -> None:
        if not self.quiet:
            say_from_rank_0(self.ranks, text)
