"""Split a step's time into data, forward and backward, communication and optimizer.

Phases do not wait for the device until their times are logged.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from orchestrator.traces.timeline import PHASE

Phase = Literal["data", "forward_backward", "exposed_comm", "optimizer"]
PHASES: tuple[Phase, ...] = ("data", "forward_backward", "exposed_comm", "optimizer")
# If more phases than this wait for a flush, finished ones are summed and their events reused.
MOST_OPEN = 1000


class Phases:
    """Times the phases of steps in milliseconds. A nested phase is subtracted from the outer one.

    Exposed communication is the time in which computation waits for a collective:

    - Collectives that the training loop calls are timed by `with phases("exposed_comm")`.
    - DDP starts all-reduces during backward and waits for the rest at its end, in a callback of the
      autograd engine. Callbacks run in the order in which they were queued. One that is queued when
      backward begins therefore marks the moment at which all gradients are computed. (With
      gradient_as_bucket_view off, copying gradients back counts as communication.)
    - FSDP2 shows its waits only in a profile. exposed_comm is then None, and forward_backward
      contains them.
    """

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self._clock = _EventClock(device) if device.type == "cuda" else _HostClock()
        self._waits = _how_it_waits(model)
        self._marked = False
        self._phase: Phase | None = None
        self._done: deque[tuple[Phase, Phase | None, Any, Any]] = deque()
        self._ms = dict.fromkeys(PHASES, 0.0)
        # The exposed communication within forward and backward.
        self._inside = 0.0
        self._data_ms = 0.0

    @contextlib.contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        outer, self._phase = self._phase, phase
        began = self._clock.mark()
        name = PHASE + phase
        try:
            with torch.profiler.record_function(name) if self._marked else contextlib.nullcontext():
                yield
        finally:
            self._phase = outer
            self._done.append((phase, outer, began, self._clock.mark()))
            if len(self._done) > MOST_OPEN:
                self._add_up()

    def mark(self, on: bool) -> None:
        """Start or stop marking the phases in a profiler trace."""
        self._marked = on

    def backward(self, loss: Tensor, **how: Any) -> None:
        """Run loss.backward(), and time DDP's wait at its end as exposed communication."""
        if self._waits != "ddp":
            loss.backward(**how)
            return
        engine = torch.autograd.Variable._execution_engine
        with contextlib.ExitStack() as waiting:

            def all_computed() -> None:
                waiting.enter_context(self("exposed_comm"))

            hook = loss.register_hook(lambda _: engine.queue_callback(all_computed))
            loss.backward(**how)
        hook.remove()

    def flush(self, steps: int) -> dict[str, float | None]:
        """Return the milliseconds per step in the `steps` since the last flush."""
        self._clock.settle()
        self._add_up()
        mean: dict[str, float | None] = {f"{name}_ms": self._ms[name] / steps for name in PHASES}
        if self._waits == "unseen":
            mean["exposed_comm_ms"] = None
            mean["forward_backward_ms"] = (self._ms["forward_backward"] + self._inside) / steps
        self._ms, self._inside = dict.fromkeys(PHASES, 0.0), 0.0
        return mean

    def data_seconds(self) -> float:
        """Return the total seconds for which this rank has waited for data."""
        self._add_up()
        return self._data_ms / 1e3

    def _add_up(self) -> None:
        while self._done and self._clock.passed(self._done[0][3]):
            phase, outer, began, ended = self._done.popleft()
            ms = self._clock.between(began, ended)
            self._count(phase, ms)
            if outer is not None:
                self._count(outer, -ms)
                self._inside += ms if outer == "forward_backward" else 0.0

    def _count(self, phase: Phase, ms: float) -> None:
        self._ms[phase] += ms
        self._data_ms += ms if phase == "data" else 0.0


def _how_it_waits(model: nn.Module) -> Literal["ddp", "never", "unseen"]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return "never"
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            # DDP broadcasts buffers before forward, which cannot be timed from outside.
            sends = module.will_sync_module_buffers()
            return "unseen" if sends else "ddp"
    return "unseen"


class _HostClock:
    """The clock for a CPU, where an operation is done when its call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        return True

    def between(self, began: float, ended: float) -> float:
        return (ended - began) * 1e3

    def settle(self) -> None:
        pass


class _EventClock:
    """The clock for a GPU: events on the compute stream, which are read when times are logged."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._spare: list[torch.cuda.Event] = []
        self._last: torch.cuda.Event | None = None

    def mark(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._last = event
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def between(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        ms: float = began.elapsed_time(ended)
        self._spare += (began, ended)
        return ms

    def settle(self) -> None:
        if self._last is not None:
            self._last.synchronize()
