"""The line of metrics in the file, the line on screen, memory, and the time that is left."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from orchestrator import files, text

# -- memory ---------------------------------------------------------------------------------------


def memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes now and at most so far: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    kilobytes = dict(line.split(":", 1) for line in status.splitlines())
    now, most = (int(kilobytes[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, most


# -- the file -------------------------------------------------------------------------------------


class MetricsFile:
    """outputs/rank_RR_metrics.jsonl of the experiment: one object of JSON per logged step.

    The second Trainer of a program has a file of its own, rank_RR_metrics_2.jsonl, and so on.

    Each begins with the time (Unix seconds) and the rank, so that lines of many files can be put
    together. A run that goes on from a checkpoint of step `after` keeps the lines up to it; another
    begins an empty file. Without an experiment (torchrun by hand) there is none. A disk that takes
    no more costs lines, never the run.
    """

    def __init__(self, rank: int, after: int = 0, trainer: int = 1) -> None:
        self._rank, self._file, self._warned = rank, None, False
        experiment = os.environ.get("ORCHESTRATOR_EXPERIMENT")
        if not experiment:
            return
        more = f"_{trainer}" if trainer > 1 else ""
        self._path = Path(experiment, "outputs", f"rank_{rank:02d}_metrics{more}.jsonl")
        try:
            # A node may not share the head's disk.
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept = _lines_up_to(self._path, after) if after else b""
            files.replace(self._path, kept)  # whole or not at all, should the disk be full
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            self._complain(error)

    def write(self, record: Mapping[str, float | None]) -> None:
        if self._file is None:
            return
        # JSON has neither NaN nor infinity.
        finite = {
            name: value if value is None or math.isfinite(value) else None
            for name, value in record.items()
        }
        line = (
            json.dumps({"time": round(time.time(), 3), "rank": self._rank} | finite).encode()
            + b"\n"
        )
        try:
            written = self._file.write(line)
            if written < len(line):  # the disk became full within the line
                self._file.truncate(self._file.seek(0, os.SEEK_END) - written)
                raise OSError("only a part of a line could be written")
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            sys.stderr.write(
                f"WARNING: metrics of rank {self._rank} are lost:"
                f" {self._path}: {error.strerror or error}\n"
            )

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def _lines_up_to(path: Path, step: int) -> bytes:
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return b""
    return b"".join(line for line in lines if 0 < _step_of(line) <= step)


def _step_of(line: bytes) -> int:
    """0 for a line that a kill cut off."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else 0
    except (ValueError, KeyError, TypeError):
        return 0


# -- the line on screen ---------------------------------------------------------------------------


class Estimate:
    """Estimate the time left, at the pace of the last 50 steps. The first step, which pays for
    set-up and compilation, does not count, nor do pauses (evaluation, checkpoints). Without a known
    number of steps it only measures them."""

    def __init__(self, steps: int | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._steps, self._clock = steps, clock
        self._last = clock()
        self._first = True
        self._left: int | None = None
        self._recent: deque[float] = deque(maxlen=50)

    def step(self, step: int) -> float:
        """End this step; return the seconds that it took, without pauses."""
        now = self._clock()
        seconds, self._last = now - self._last, now
        if not self._first:
            self._recent.append(seconds)
        self._first = False
        self._left = None if self._steps is None else self._steps - step
        return seconds

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            self._last += self._clock() - began

    def seconds(self) -> float | None:
        if self._left is None or not self._recent:
            return None
        return self._left * sum(self._recent) / len(self._recent)


def progress(
    record: Mapping[str, float | None],
    steps: int | None,
    eta_seconds: float | None,
    *,
    unit: str = "tokens",
    metrics: Mapping[str, float | None] = {},
) -> str:
    """Write the line on screen; the columns keep their places from line to line."""
    total = f"/{steps}" if steps else ""
    parts = [
        f"step {record['step']:>{len(total) - 1 if total else 6}}{total}",
        f"loss {_number(record['loss'], 8, '.4f')}",
        *(f"{name} {_number(value, 8, '.4f')}" for name, value in metrics.items()),
        f"lr {record['lr']:.2e}",
        f"grad norm {_number(record['grad_norm'], 8, '.3f')}",
        f"{_number(record['tokens_per_s'], 11, ',.0f')} {unit}/s",
        f"{_number(record['step_ms'], 8, ',.0f')} ms/step",
    ]
    if record.get("mfu") is not None:
        parts.append(f"mfu {record['mfu']:>6.1%}")
    if eta_seconds is not None:
        parts.append(f"{text.duration(round(eta_seconds)):>11} left")
    if record.get("skipped_steps"):
        parts.append(f"{record['skipped_steps']:.0f} skipped")
    return "  ".join(parts)


def _number(value: float | None, width: int, form: str) -> str:
    plain = "-" if value is None else format(value, form)
    return f"{plain if len(plain) <= width or value is None else format(value, '.2e'):>{width}}"
