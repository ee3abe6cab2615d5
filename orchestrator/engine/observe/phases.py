"""Split a step's time: data, forward and backward, communication, the optimizer.

None of it waits for the device before something is logged, and nothing of torch is touched unless
somebody profiles.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from orchestrator.traces.rank import PHASE

Phase = Literal["data", "forward_backward", "exposed_comm", "optimizer"]
PHASES: tuple[Phase, ...] = ("data", "forward_backward", "exposed_comm", "optimizer")


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

    To see FSDP2's waits, torch has to be patched while a step computes, which is done with
    `profiling` alone. exposed_comm is None where they
    do not, and forward_backward then contains the waits. Collectives that the training loop itself
    calls are to be put into `with phases("exposed_comm")`.
    """

    def __init__(self, device: torch.device, model: nn.Module, *, profiling: bool) -> None:
        self._clock = _EventClock(device) if device.type == "cuda" else _HostClock()
        self._waits = _how_it_waits(model)
        if self._waits == "fsdp" and not profiling:
            self._waits = None
        self._marked = False
        self._spans = {phase: _Span(self, phase) for phase in PHASES}
        self._open: list[tuple[Phase, Any, contextlib.ExitStack | None]] = []
        self._done: deque[tuple[Phase, Phase | None, Any, Any]] = deque()
        self._ms = dict.fromkeys(PHASES, 0.0)
        self._inside = 0.0  # exposed communication within forward and backward
        self._data_seconds = 0.0  # since the beginning

    def __call__(self, phase: Phase) -> contextlib.AbstractContextManager[None]:
        return self._spans[phase]

    def begin(self, phase: Phase) -> None:
        fsdp, around = phase == "forward_backward" and self._waits == "fsdp", None
        began = self._clock.mark()
        if fsdp or self._marked:
            around = contextlib.ExitStack()
            if fsdp:
                around.enter_context(self._clock.fsdp_waits(self._exposed))
            if self._marked:
                around.enter_context(torch.profiler.record_function(PHASE + phase))
        self._open.append((phase, began, around))

    def end(self) -> None:
        phase, began, around = self._open.pop()
        if around is not None:
            around.close()
        outer = self._open[-1][0] if self._open else None
        self._done.append((phase, outer, began, self._clock.mark()))
        if len(self._done) > 1000:  # many steps between two flushes: events are used again
            self._add_up()

    def mark(self, on: bool) -> None:
        """Let the phases be seen in a trace, or not."""
        self._marked = on

    def backward(self, loss: Tensor, **how: Any) -> None:
        """loss.backward(), and what DDP waits for at its end."""
        if self._waits != "ddp":
            loss.backward(**how)  # type: ignore[no-untyped-call]
            return
        engine = torch.autograd.Variable._execution_engine
        with contextlib.ExitStack() as waiting:

            def all_computed() -> None:
                waiting.enter_context(self._exposed())

            hook = loss.register_hook(lambda _: engine.queue_callback(all_computed))  # type: ignore[no-untyped-call]
            loss.backward(**how)  # type: ignore[no-untyped-call]
        hook.remove()

    def flush(self, steps: int) -> dict[str, float | None]:
        """Milliseconds per step since the last flush, which was so many steps ago."""
        self._clock.settle()
        self._add_up()
        mean: dict[str, float | None] = {f"{name}_ms": self._ms[name] / steps for name in PHASES}
        if self._waits is None:
            mean["exposed_comm_ms"] = None
            mean["forward_backward_ms"] = (self._ms["forward_backward"] + self._inside) / steps
        self._ms, self._inside = dict.fromkeys(PHASES, 0.0), 0.0
        return mean

    def data_seconds(self) -> float:
        """Return the seconds so far in which this rank waited for data."""
        self._add_up()
        return self._data_seconds

    def _exposed(self) -> contextlib.AbstractContextManager[None]:
        return self("exposed_comm")

    def _add_up(self) -> None:
        while self._done and self._clock.passed(self._done[0][3]):
            phase, outer, began, ended = self._done.popleft()
            ms = self._clock.between(began, ended)
            self._ms[phase] += ms
            self._data_seconds += ms / 1e3 if phase == "data" else 0.0
            if outer is not None:
                self._ms[outer] -= ms
                self._data_seconds -= ms / 1e3 if outer == "data" else 0.0
                self._inside += ms if outer == "forward_backward" else 0.0


class _Span(contextlib.AbstractContextManager[None]):
    """One phase of every step."""

    def __init__(self, phases: Phases, phase: Phase) -> None:
        self._phases, self._phase = phases, phase

    def __enter__(self) -> None:
        self._phases.begin(self._phase)

    def __exit__(self, *error: object) -> None:
        self._phases.end()


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
        original = getattr(self._module, name)
        if name not in self.NAMES:
            return original

        def timed(*arguments: Any, **named: Any) -> Any:
            with self._exposed():
                return original(*arguments, **named)

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
