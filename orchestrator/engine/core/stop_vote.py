"""The vote of the ranks on what happens after a step: one small message per step, between CPUs.

A rank that left on its own would leave the others waiting in a collective. So a rank only requests,
and what any of them requested is done by all after the same step. The message travels while the
step computes, so that nobody waits for it, and no GPU is asked. Only where a hook runs after each
step, which may end the training, does it travel after the hook.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import torch
import torch.distributed as dist

from orchestrator.engine.ranks import ranks

# ENOUGH: Trainer.stop(), which min_period delays. PROFILE: so many steps are to be traced.
STOP, TIME, SAVE, EVALUATE, ENOUGH, PROFILE = range(6)
ONCE = (SAVE, EVALUATE, PROFILE)  # done and forgotten; the others hold until the training ends
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopVote:
    """Signals and clocks end a training through this."""

    def __init__(self) -> None:
        self.alone = dist.get_world_size() == 1
        self.group = ranks.host_group()
        self.requested: dict[int, int] = {}
        self.sent = torch.zeros(6, dtype=torch.int32)
        self.work: dist.Work | None = None

    def request(self, what: int, amount: int = 1) -> None:
        self.requested[what] = amount

    def requests(self, what: int) -> bool:
        """Return whether this rank requests it already."""
        return what in self.requested

    def post(self) -> None:
        """Send this rank's requests; result() has the answer."""
        self.sent = torch.tensor([self.requested.get(what, 0) for what in range(6)])
        self._take_once()
        if not self.alone:
            self.work = dist.all_reduce(
                self.sent, dist.ReduceOp.MAX, group=self.group, async_op=True
            )

    def result(self) -> list[int]:
        """Return the votes by STOP, TIME, ...: the highest of all ranks, the same on all."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return [int(value) for value in self.sent.tolist()]

    def poll(self) -> list[int]:
        """Vote at once, between steps; what is done after a step waits for the next one."""
        kept = self._take_once()
        self.post()
        self.requested |= kept
        return self.result()

    def _take_once(self) -> dict[int, int]:
        return {what: self.requested.pop(what) for what in ONCE if what in self.requested}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Turn signals into a request to stop. SIGTERM is how a stop arrives, on every node at its
        own moment; SIGINT is Ctrl-C; SIGUSR1 is sent by Slurm, if told to, before time is over."""
        main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in SIGNALS if main}
        if before.get(signal.SIGUSR1, signal.SIG_DFL) is not signal.SIG_DFL:
            del before[signal.SIGUSR1]  # the user's own
        by_hand = self.alone and "LOCAL_RANK" not in os.environ  # a launcher may signal twice

        def stop(number: int, frame: FrameType | None) -> None:
            self.request(STOP)
            if by_hand:  # a second one ends it at once
                signal.signal(number, before[signal.Signals(number)])

        for number in before:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
