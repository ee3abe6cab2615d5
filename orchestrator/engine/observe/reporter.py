"""Report a training: its steps, metrics and epochs; on screen, in files, to trackers."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from orchestrator.common.errors import JobFailed
from orchestrator.common.text import Say
from orchestrator.config.schema import Config
from orchestrator.engine.observe import metrics, speed
from orchestrator.engine.observe.phases import Phases
from orchestrator.engine.observe.trackers import Trackers
from orchestrator.engine.ranks.ranks import Ranks, device_name, say_once
from orchestrator.engine.sharding.refusals import OTHER_PARTS

# -- the results of steps --------------------------------------------------------------------------


@dataclass(frozen=True)
class StepReport:
    """The results of one step, over all ranks, still on the device."""

    step: int
    names: tuple[str, ...]  # "loss" first
    total: Tensor  # the squares of each optimizer's gradients; the sum and the count of each name
    grad_norm: Tensor  # of the mean loss, before clipping
    bad: Tensor  # 1.0 where the step was skipped
    apart: Tensor | None  # 1.0 where the ranks used other parts of the model: skipped, too
    scale: float | Tensor  # of the losses, in fp16
    lr: float | Tensor
    # The same of each optimizer, where there are several.
    each: Mapping[str, float | Tensor] = field(default_factory=dict)
    optimizers: int = 1

    def value(self, name: str) -> float | Tensor | None:
        return self.each[name] if name in self.each else getattr(self, name)


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
    each: Mapping[str, float]


@dataclass
class Ledger:
    ids: list[list[int] | None] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    steps: list[tuple[StepReport, list[list[int] | None], list[Tensor]]] = field(
        default_factory=list
    )
    in_a_row: int = 0  # bad steps, for no reason that goes away by itself

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
        reports = [report for report, _, _ in steps]
        more = tuple(reports[0].each)
        widths = [len(report.total) for report in reports]  # a name may come later
        totals = iter(torch.cat([report.total for report in reports]).tolist())
        columns = (
            [list(itertools.islice(totals, width)) for width in widths],
            *(on_host([r.value(name) for r in reports]) for name in (*MEASURED, *more)),
        )
        for (report, ids, losses), row in zip(steps, zip(*columns, strict=True), strict=True):
            total, norm, bad, apart, scale, lr, *each = row
            sums = total[report.optimizers :]
            self._count(bool(bad and sums[1]), curable=scale > 1.0, bad=bool(bad))
            finite = torch.stack(losses).isfinite().tolist() if bad and losses else []
            culprits = [own for own, good in zip(ids, finite, strict=False) if not good]
            pairs = zip(sums[::2], sums[1::2], strict=True)
            yield StepResult(
                report.step,
                dict(zip(report.names, pairs, strict=True)),
                norm,
                bool(bad),
                self.in_a_row,
                bool(apart),
                bool(culprits),
                [i for own in culprits for i in own or ()],
                lr,
                dict(zip(more, each, strict=True)),
            )

    def _count(self, lost: bool, *, curable: bool, bad: bool) -> None:
        """Count bad steps in a row. One without targets is no loss, and an overflow in fp16 only
        says that the scale is too large, until there is nothing left to halve."""
        self.in_a_row = self.in_a_row + lost if bad and not (lost and curable) else 0


BAD = "bad_"  # before the name of an optimizer whose step was skipped
MEASURED = ("grad_norm", "bad", "apart", "scale", "lr")


def on_host(values: Sequence[Tensor | float | None]) -> list[float]:
    """Read many numbers at once, those that are on a device; none is zero."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(read) if isinstance(value, Tensor) else value or 0.0 for value in values]


@dataclass(frozen=True)
class Measures:
    """The figures that a training's numbers are compared with."""

    max_steps: int | None  # where that is known
    unit: str  # of what the loss counts: tokens, targets, samples
    samples_per_step: float | None  # of this rank
    flops_per_sample: float | None  # forward and backward
    # What is left: steps, and seconds of a clock that ends it; None where there is no such limit.
    left: Callable[[], tuple[int | None, float | None]] = lambda: (None, None)


LEFT = "left_s"
RESERVED = ("time", "rank", "step", "epoch")  # of every line; a metric of such a name has no place


class Reporter:
    """Waits for the device where it reports, and nowhere else."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        model: nn.Module,
        measures: Measures,
        *,
        step: int,
        tokens: int,
        trainer: int = 1,  # which of this program's Trainers it is
        trackers: Trackers | None = None,
        say: Say,
    ) -> None:
        self.config, self.ranks, self.measures, self.say = config, ranks, measures, say
        self.tokens, self.skipped = tokens, 0
        self.phases = Phases(ranks.device, model)
        self.account, self.data_counted = metrics.of_process(), 0.0
        self.account.begin(step)
        self.ledger = Ledger()
        self.file = metrics.MetricsFile(ranks.rank, step, trainer, measures.unit)
        self.trackers = trackers
        self.estimate = metrics.Estimate()
        self.epoch_sums: dict[str, list[float]] = {}  # the sum and the count of each name
        self.peak: float | None = None
        self.measured: float | None = None
        if measures.flops_per_sample:
            dtype = speed.matmul_dtype(config.training.mixed_precision)
            self.peak = speed.peak_flops(device_name(ranks.device), dtype)
            self.measured = speed.measured_matmul_flops(ranks.device, dtype)
        self.busy = 0.0  # seconds in steps since the last line, without pauses
        self.logged_step, self.logged_tokens = step, tokens
        self.begun = False  # the first step of a run has its line
        self.latest: StepResult | None = None
        self.seen: dict[str, tuple[float, float]] = {}  # of each name the latest step that had it
        run, local = os.environ.get("ORCHESTRATOR_RUN"), os.environ.get("LOCAL_RANK", "0")
        self.sign = Path(run, f"step_{local}") if run else None

    # -- after every step -------------------------------------------------------------------------

    def alive(self) -> None:
        """Give a sign to those who watch whether the job goes on, however seldom it prints."""
        if self.sign is not None:
            self.sign.touch()

    def after_step(self, step: int, epoch: int, *, last: bool) -> None:
        self.alive()
        self.busy += self.estimate.step()
        data = self.phases.data_seconds()
        self.account.after_step(step, data - self.data_counted)
        self.data_counted = data
        if due(self.config.logging.interval, step) or last or not self.begun:
            self.log(step, epoch, last=last)
        elif len(self.ledger.steps) >= self.config.training.max_bad_steps:
            self.flush()

    def flush(self) -> None:
        """Read what the steps came to: the one place where the host waits for the device."""
        for result in self.ledger.read():
            self.latest = result
            several = bool(result.each)
            self.seen |= {n: p for n, p in result.sums.items() if p[1] or not several}
            if result.apart:
                raise JobFailed(
                    "the ranks used other parts of the model than each other in step"
                    f" {result.step}, which was not taken",
                    OTHER_PARTS,
                )
            self.tokens += int(result.sums["loss"][1])
            if result.skipped:
                self._say_skipped(result)
            else:
                add(self.epoch_sums, result.sums)
            if result.bad_in_a_row >= self.config.training.max_bad_steps:
                raise JobFailed(
                    f"{result.bad_in_a_row} steps in a row had NaN or inf, the last was step"
                    f" {result.step}",
                    "look at the samples named above, or try a smaller learning rate"
                    " (optimizer.lr), or a warmup",
                )

    def _say_skipped(self, result: StepResult) -> None:
        self.skipped += 1
        skipped = [name for name, bad in result.each.items() if name.startswith(BAD) and bad]
        which = [name.removeprefix(BAD) for name in skipped]
        step = (
            f"step {result.step} {'of ' * bool(which)}{', '.join(which)}".rstrip() + " is skipped"
        )
        if not result.sums["loss"][1]:
            self.say(f"{step}: none of its targets counts")
        elif result.bad_samples:
            say_once(f"{step} on all ranks: NaN or inf in samples {result.bad_samples[:16]}")
        elif result.bad_here:
            say_once(f"{step} on all ranks: NaN or inf in the loss of rank {self.ranks.rank}")
        elif self.config.training.mixed_precision == "fp16":
            self.say(f"{step}: fp16 overflowed, the loss's scale is halved")
        else:
            self.say(f"{step} on all ranks: NaN or inf in the loss or the gradients")

    def log(self, step: int, epoch: int, *, last: bool) -> None:
        self.flush()
        assert self.latest is not None
        seconds, steps = self.busy, step - self.logged_step
        memory, peak = metrics.memory(self.ranks.device)
        means = means_of({**self.latest.sums, **self.seen})
        per_step = self.measures.samples_per_step
        record: dict[str, float | None] = {
            "step": step,
            "epoch": epoch,
            **{name: value for name, value in means.items() if name not in RESERVED},
            "lr": self.latest.lr,
            "grad_norm": self.latest.grad_norm,
            **{name: v for name, v in self.latest.each.items() if not name.startswith(BAD)},
            "tokens": self.tokens,
            "tokens_per_s": (self.tokens - self.logged_tokens) / seconds,
            "step_ms": seconds / steps * 1e3,
            **self.phases.flush(steps),
            "memory_bytes": memory,
            "memory_peak_bytes": peak,
            **self._utilization(per_step and steps * per_step / seconds),
            "skipped_steps": self.skipped,
        }
        left = None if last else self._left()
        self._write(record | ({} if left is None else {LEFT: round(left, 1)}))
        others = {name: value for name, value in means.items() if name != "loss"}
        shown = metrics.progress(
            record, self.measures.max_steps, left,
            unit=self.measures.unit, metrics=others,
        )  # fmt: skip
        self.say(shown)
        self.busy, self.logged_step, self.begun = 0.0, step, True
        self.logged_tokens = self.tokens

    def _left(self) -> float | None:
        """Return the seconds until the end, where they are known."""
        steps, clock = self.measures.left()
        known = [s for s in (self.estimate.seconds(steps), clock) if s is not None]
        return min(known, default=None)

    def _utilization(self, samples_per_s: float | None) -> dict[str, float | None]:
        """Compare with what the vendor promises, and with what a large multiplication reaches."""
        if not self.measures.flops_per_sample or not samples_per_s:
            return {"mfu": None, "mfu_measured": None}
        used = self.measures.flops_per_sample * samples_per_s
        return {"mfu": speed.mfu(used, self.peak), "mfu_measured": speed.mfu(used, self.measured)}

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
        """Write down the checkpoints whose files are there by now; pruning takes no line away."""
        for saved, size, seconds in done:
            spent = round(seconds, 3)
            self.file.write(
                {"step": step, "saved_step": saved, "saved_bytes": size, "saved_s": spent}
            )
        done.clear()

    def _write(self, record: Mapping[str, float | None]) -> None:
        self.file.write(record)
        if self.trackers is not None:
            shown = {k: v for k, v in record.items() if k not in ("step", LEFT) and v is not None}
            self.trackers.log(shown, int(record["step"] or 0))


def add(to: dict[str, list[float]], sums: Mapping[str, tuple[float, float]]) -> None:
    for name, (total, count) in sums.items():
        before = to.setdefault(name, [0.0, 0.0])
        to[name] = [before[0] + total, before[1] + count]


def means_of(sums: Mapping[str, tuple[float, float] | list[float]]) -> dict[str, float]:
    return {name: total / count if count else math.nan for name, (total, count) in sums.items()}


def say(ranks: Ranks, text: str) -> None:
    """Say for all ranks what one has to say."""
    if ranks.rank == 0:
        say_once(text)


def due(every: int | None, step: int) -> bool:
    return bool(every) and step % (every or 1) == 0
