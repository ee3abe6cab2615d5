"""What all ranks decide together: one small message per step, between CPUs. For train.py.

A rank that left on its own would leave the others in a collective for ever. So a rank only asks,
and what any of them asked for is done by all after the same step. The message travels while the
step computes, so that nobody waits for it, and no GPU is asked.
"""

from __future__ import annotations

import signal
from types import FrameType

import torch
import torch.distributed as dist

from orchestrator.engine.ranks import ranks

STOP, TIME, SAVE, EVALUATE, ENOUGH = range(5)  # the last: of a user of the Trainer


class Agreement:
    """Signals end a run through this; clocks too, of which only rank 0's counts."""

    def __init__(self) -> None:
        self.alone = dist.get_world_size() == 1
        self.group = ranks.host_group()
        self.wanted: set[int] = set()
        self.sent = torch.zeros(5, dtype=torch.int32)
        self.work: dist.Work | None = None

    def listen(self) -> None:
        """SIGTERM is how a stop arrives, on every node at its own moment; Ctrl-C by hand; SIGUSR1
        where Slurm was told to signal the ranks themselves before their time is over."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._signalled)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self.wanted.add(STOP)

    def ask(self, what: int) -> None:
        self.wanted.add(what)

    def send(self) -> None:
        """Tell the others; the answer comes with agreed()."""
        self.sent = torch.tensor([int(what in self.wanted) for what in range(5)])
        self.wanted -= {SAVE, EVALUATE}
        if not self.alone:
            self.work = dist.all_reduce(
                self.sent, dist.ReduceOp.MAX, group=self.group, async_op=True
            )

    def agreed(self) -> list[bool]:
        """By STOP, TIME, SAVE, EVALUATE, ENOUGH: the same on all ranks."""
        if self.work is not None:
            self.work.wait()
        return [bool(value) for value in self.sent.tolist()]

    def now(self) -> list[bool]:
        """Ask and hear at once, where there is no step to hide it behind."""
        self.send()
        return self.agreed()
