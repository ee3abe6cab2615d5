"""Write metrics to the screen and to files, and account for the time of an attempt."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from orchestrator.common import files
from orchestrator.common.text import format_duration
from orchestrator.records.metrics import trainers

# -- memory ---------------------------------------------------------------------------------------


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return the present and the peak bytes: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    kilobytes = dict(line.split(":", 1) for line in status.splitlines())
    now, most = (int(kilobytes[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, most


# -- the metrics file -----------------------------------------------------------------------------


class MetricsFile:
    """Appends to outputs/rank_RR_metrics.jsonl of the experiment: a JSON object per logged step.

    The second Trainer of a program has its own file, rank_RR_metrics_2.jsonl, and so on.

    Each line begins with the time (Unix seconds) and the rank, so that lines of many files can be
    merged. A run that resumes from a checkpoint of step `after` keeps the lines up to it; any other
    run starts with an empty file. Without an experiment (torchrun by hand) nothing is written. A
    full disk loses lines, with one warning, and never ends the run.
    """

    def __init__(
        self, rank: int, after: int = 0, trainer: int = 1, unit: str = trainers.TOKENS
    ) -> None:
        self._rank, self._after, self._lost = rank, after, 0
        # A line names the unit that `tokens` counts, unless it is tokens.
        self._unit = {} if unit == trainers.TOKENS else {trainers.UNIT: unit}
        self._file: io.FileIO | None = None
        experiment = os.environ.get("ORCHESTRATOR_EXPERIMENT", "")
        self._path = Path(experiment, "outputs", trainers.file_name(rank, trainer))
        self._wanted = bool(experiment)
        if self._wanted:
            self._append(b"")

    def write(self, record: Mapping[str, float | None]) -> None:
        if not self._wanted:
            return
        # JSON has neither NaN nor infinity.
        finite = {
            name: value if value is None or math.isfinite(value) else None
            for name, value in record.items()
        }
        unit = self._unit if "tokens" in record else {}
        about = {"time": round(time.time(), 3), "rank": self._rank}
        self._append(json.dumps(about | finite | unit).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        """Append a line. If the disk has no room for all of it, no part of it is written."""
        try:
            if self._file is None:
                # A node may not share the head's disk.
                self._path.parent.mkdir(parents=True, exist_ok=True)
                kept = _lines_up_to(self._path, self._after) if self._after else b""
                # A full disk must not leave half of the earlier lines, so this is atomic.
                files.replace_file(self._path, kept)
                self._file = os.fdopen(files.open_to_append(self._path), "ab", buffering=0)
            if files.append_lines(self._file.fileno(), line) < len(line):
                raise OSError("there is no room for a line")
        except OSError as error:
            if not self._lost:
                what = f"metrics of rank {self._rank} are lost: {self._path}"
                sys.stderr.write(f"WARNING: {what}: {error.strerror or error}\n")
            self._lost += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _lines_up_to(path: Path, step: int) -> bytes:
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return b""
    return b"".join(line for line in lines if 0 < _step_of(line) <= step)


def _step_of(line: bytes) -> int:
    """Return the step of a line, or 0 if a kill cut the line off."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else 0
    except (ValueError, KeyError, TypeError):
        return 0


# -- the progress line ----------------------------------------------------------------------------


class Estimate:
    """Estimates the time left, from the mean of the last 50 steps.

    The first step, which includes set-up and compilation, does not count. Pauses (evaluation,
    checkpoints, hooks) are not part of a step. The estimate adds them in the proportion that they
    have had since the first step.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last = clock()
        self._first = True
        # The time at which the first step ended, and the seconds in steps since then.
        self._began = self._last
        self._stepping = 0.0
        self._recent: deque[float] = deque(maxlen=50)

    def step(self) -> float:
        """End a step; return its seconds without pauses."""
        now = self._clock()
        seconds, self._last = now - self._last, now
        if self._first:
            self._first, self._began = False, now
        else:
            self._recent.append(seconds)
            self._stepping += seconds
        return seconds

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the block's time from the step. Nested pauses count once."""
        began, last = self._clock(), self._last
        try:
            yield
        finally:
            self._last = last + self._clock() - began

    def seconds(self, steps: int | None) -> float | None:
        """Return the estimated seconds of `steps` further steps, or None if unknown."""
        if steps is None or not self._recent or not self._stepping:
            return None
        with_pauses = max(1.0, (self._clock() - self._began) / self._stepping)
        return steps * sum(self._recent) / len(self._recent) * with_pauses


def progress_line(
    record: Mapping[str, float | None],
    steps: int | None,
    eta_seconds: float | None,
    *,
    unit: str = "tokens",
    metrics: Mapping[str, float | None] = {},
) -> str:
    """Return the progress line for the screen."""
    total = f"/{steps}" if steps else ""
    parts = [
        f"step {record['step']:>{len(total) - 1 if total else 6}}{total}",
        f"loss {short_number(record['loss'])}",
        *(f"{name} {short_number(value)}" for name, value in metrics.items()),
        f"grad {short_number(record['grad_norm'])}",
        f"{record['tokens_per_s'] or 0.0:,.0f} {unit}/s",
        f"{record['step_ms'] or 0.0:,.1f} ms/step",
    ]
    if record.get("mfu") is not None:
        parts.append(f"mfu {record['mfu']:.1%}")
    # There is no estimate after the first step and after the last.
    if seconds := round(eta_seconds or 0.0):
        parts.append(f"{format_duration(seconds)} left")
    if record.get("skipped_steps"):
        parts.append(f"{record['skipped_steps']:.0f} skipped")
    return "  ".join(parts)


def short_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


# -- the time of an attempt ------------------------------------------------------------------------


# The interval between two lines, and so the most that a failure leaves unrecorded.
LINES_APART_SECONDS = 2.0
# The time at which the engine was imported. Time before it counts as start-up.
BEGAN = time.time()
NAME = "time_spent.jsonl"


class StepAccount:
    """Records the steps of an attempt, and rank 0's seconds of waiting for data and checkpoints.

    There is one per process; the times of several trainings in a program add up.
    """

    def __init__(self) -> None:
        experiment = os.environ.get("ORCHESTRATOR_EXPERIMENT")
        first = os.environ.get("RANK", "0") == "0"
        self.path = Path(experiment, "outputs", NAME) if experiment and first else None
        self.attempt = int(os.environ.get("ORCHESTRATOR_ATTEMPT", "1"))
        # The time at which the first training began.
        self.trains: float | None = None
        self.first = self.step = 0
        # The seconds for which the training waited for data and for checkpoints.
        self.data = self.checkpoints = 0.0
        self.written_at = 0.0

    def begin(self, step: int) -> None:
        """Record the start of training, after `step` steps of earlier attempts."""
        if self.trains is None:
            self.trains, self.first = time.time(), step
        self.step = step
        self.write()

    def after_step(self, step: int, data: float) -> None:
        self.step = step
        self.data += data
        if time.monotonic() - self.written_at >= LINES_APART_SECONDS:
            self.write()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.checkpoints += time.monotonic() - began

    def write(self) -> None:
        self.written_at = time.monotonic()
        if self.path is None:
            return
        line = {
            "attempt": self.attempt,
            "began": BEGAN,
            "trains": self.trains,
            "first": self.first,
            "time": time.time(),
            "step": self.step,
            "data": round(self.data, 4),
            "checkpoints": round(self.checkpoints, 4),
        }
        # A full disk loses this record and must not end the run.
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            files.add_lines(self.path, json.dumps(line).encode("ascii") + b"\n")


@functools.cache
def account_of_process() -> StepAccount:
    return StepAccount()
