"""What a step cost: where its time went, its memory, the line in the file and the line on screen.

Called by train.py once per step; none of it waits for the device before something is logged.
"""

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
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from orchestrator import files, text

Phase = Literal["data", "forward_backward", "exposed_comm", "optimizer"]
PHASES: tuple[Phase, ...] = ("data", "forward_backward", "exposed_comm", "optimizer")

# -- where the time went --------------------------------------------------------------------------


class Phases:
    """Splits steps into phases, in milliseconds. A phase inside a phase is taken from the outer.

    Exposed communication is the time in which computation stands still for a collective:

    - FSDP2 on a CPU calls gloo in the thread that computes, so every collective is exposed whole.
    - FSDP2 on a GPU runs collectives on streams of its own, and lets the computing stream wait for
      their events: before a block's parameters are copied out, before the memory of a
      reduce-scatter is used again, at the end of backward. Those waits are timed, between events.
    - DDP starts all-reduces while backward goes on and waits for the rest at the end of it, in a
      callback of the autograd engine. Callbacks run in the order in which they were queued, so one
      that is queued when backward begins marks the moment at which all gradients are computed.
      (With gradient_as_bucket_view off, copying them back counts as communication.)

    It is None where no such place is known, and forward_backward then contains it. Collectives that
    the training loop itself calls are to be put into `with phases("exposed_comm")`.
    """

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self._clock = _EventClock(device) if device.type == "cuda" else _HostClock()
        self._waits = _how_it_waits(model)
        self._open: list[Phase] = []
        self._done: deque[tuple[Phase, Phase | None, Any, Any]] = deque()
        self._ms = dict.fromkeys(PHASES, 0.0)

    @contextlib.contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        outer = self._open[-1] if self._open else None
        fsdp = phase == "forward_backward" and self._waits == "fsdp"
        self._open.append(phase)
        began = self._clock.mark()
        try:
            with self._clock.fsdp_waits(self._exposed) if fsdp else contextlib.nullcontext():
                yield
        finally:
            self._open.pop()
            self._done.append((phase, outer, began, self._clock.mark()))
            if len(self._done) > 1000:  # many steps between two flushes: events are used again
                self._add_up()

    def backward(self, loss: Tensor) -> None:
        """loss.backward(), and what DDP waits for at its end."""
        if self._waits != "ddp":
            loss.backward()  # type: ignore[no-untyped-call]
            return
        engine = torch.autograd.Variable._execution_engine
        with contextlib.ExitStack() as waiting:

            def all_computed() -> None:
                waiting.enter_context(self._exposed())

            hook = loss.register_hook(lambda _: engine.queue_callback(all_computed))  # type: ignore[no-untyped-call]
            loss.backward()  # type: ignore[no-untyped-call]
        hook.remove()

    def flush(self, steps: int) -> dict[str, float | None]:
        """Milliseconds per step since the last flush, which was so many steps ago."""
        self._clock.settle()
        self._add_up()
        mean: dict[str, float | None] = {f"{name}_ms": self._ms[name] / steps for name in PHASES}
        if self._waits is None:
            mean["exposed_comm_ms"] = None
        self._ms = dict.fromkeys(PHASES, 0.0)
        return mean

    def _exposed(self) -> contextlib.AbstractContextManager[None]:
        return self("exposed_comm")

    def _add_up(self) -> None:
        while self._done and self._clock.passed(self._done[0][3]):
            phase, outer, began, ended = self._done.popleft()
            ms = self._clock.between(began, ended)
            self._ms[phase] += ms
            if outer is not None:
                self._ms[outer] -= ms


def _how_it_waits(model: nn.Module) -> Literal["fsdp", "ddp", "never"] | None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return "never"
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            # It sends buffers before the forward pass; there is no place to time that.
            sends = module.will_sync_module_buffers()  # type: ignore[no-untyped-call]
            return None if sends else "ddp"
        if hasattr(module, "set_requires_gradient_sync"):  # torch's FSDPModule
            return "fsdp"
    return None


class _HostClock:
    """On a CPU an operation is over when its call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        return True

    def between(self, began: float, ended: float) -> float:
        return (ended - began) * 1e3

    def settle(self) -> None:
        pass

    def fsdp_waits(
        self, exposed: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> contextlib.AbstractContextManager[None]:
        """FSDP2 takes its collectives from the name `dist` of one module. set_custom_all_gather is
        the public way to the same calls, but there is none to the all-reduce of hybrid sharding."""
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives

        return _swapped(_fsdp_collectives, "dist", _Timed(dist, exposed))


class _Timed:
    """torch.distributed, with the collectives that FSDP2 calls timed."""

    # The last two are what earlier versions of torch call the first two.
    NAMES = (
        *("all_gather_single", "reduce_scatter_single", "all_reduce"),
        *("all_gather_into_tensor", "reduce_scatter_tensor"),
    )

    def __init__(
        self, module: Any, exposed: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        self._module, self._exposed = module, exposed

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if name not in self.NAMES:
            return found

        def timed(*words: Any, **named: Any) -> Any:
            with self._exposed():
                return found(*words, **named)

        return timed


class _EventClock:
    """On a GPU a moment is an event on the computing stream, read when something is logged."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._spare: list[torch.cuda.Event] = []
        self._last: torch.cuda.Event | None = None

    def mark(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else _timing_event()
        event.record(self._stream)
        self._last = event
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def between(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        ms: float = began.elapsed_time(ended)
        self._spare += (began, ended)
        return ms

    def settle(self) -> None:
        if self._last is not None:
            self._last.synchronize()

    @contextlib.contextmanager
    def fsdp_waits(
        self, exposed: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> Iterator[None]:
        """All of FSDP2's waits are calls of Stream.wait_event; those of its own streams for each
        other cost nothing here and pass."""
        wait = torch.cuda.Stream.wait_event

        def timed(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
            with exposed() if stream == self._stream else contextlib.nullcontext():
                wait(stream, event)

        with _swapped(torch.cuda.Stream, "wait_event", timed):
            yield


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


# -- memory ---------------------------------------------------------------------------------------


def memory(device: torch.device) -> tuple[int, int]:
    """Bytes now and at most so far: what tensors hold on a GPU, what the process holds on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    kilobytes = dict(line.split(":", 1) for line in status.splitlines())
    now, most = (int(kilobytes[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, most


# -- the file -------------------------------------------------------------------------------------


class MetricsFile:
    """outputs/rank_RR_metrics.jsonl of the experiment: one object of JSON per logged step.

    A run that goes on from a checkpoint of step `after` keeps the lines up to it; another begins an
    empty file. Without an experiment (torchrun by hand) there is none. A disk that takes no more
    costs lines, never the run.
    """

    def __init__(self, rank: int, after: int = 0) -> None:
        self._rank, self._file, self._told = rank, None, False
        experiment = os.environ.get("ORCHESTRATOR_EXPERIMENT")
        if not experiment:
            return
        self._path = Path(experiment, "outputs", f"rank_{rank:02d}_metrics.jsonl")
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
        line = json.dumps(finite).encode() + b"\n"
        try:
            written = self._file.write(line)
            if written < len(line):  # the disk became full within the line
                self._file.truncate(self._file.seek(0, os.SEEK_END) - written)
                raise OSError("only a part of a line could be written")
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._told:
            self._told = True
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
    """How long the rest takes, at the pace of the last 50 steps. The first step, which pays for
    set-up and compilation, does not count, nor do pauses (evaluation, checkpoints)."""

    def __init__(self, steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._steps, self._clock = steps, clock
        self._last = clock()
        self._left: int | None = None
        self._recent: deque[float] = deque(maxlen=50)

    def step(self, step: int) -> float:
        """This step is over; the seconds it took, without pauses."""
        now = self._clock()
        seconds, self._last = now - self._last, now
        if self._left is not None:
            self._recent.append(seconds)
        self._left = self._steps - step
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


def progress(record: Mapping[str, float | None], steps: int, eta_seconds: float | None) -> str:
    """The columns keep their places from line to line."""
    parts = [
        f"step {record['step']:>{len(str(steps))}}/{steps}",
        f"loss {_number(record['loss'], 8, '.4f')}",
        f"lr {record['lr']:.2e}",
        f"grad norm {_number(record['grad_norm'], 8, '.3f')}",
        f"{_number(record['tokens_per_s'], 11, ',.0f')} tokens/s",
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
