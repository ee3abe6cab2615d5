"""Keeps the newest states of all ranks in memory, for a restart of the ranks.

They are checkpoints in a directory below $ORCHESTRATOR_MEMORY_DIR, which is in memory and outlives
the ranks. A shard that only one node holds is also kept by the next node.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from orchestrator.common import text
from orchestrator.common.errors import CheckFailed, JobFailed
from orchestrator.common.text import Say
from orchestrator.config import schema
from orchestrator.engine.ranks.ranks import (
    Ranks,
    free_host_memory,
    gather_values,
)
from orchestrator.engine.saving.checkpoint import Checkpoints
from orchestrator.engine.saving.ownership import TrainingRun
from orchestrator.engine.saving.search import why_unfit
from orchestrator.engine.sharding.mesh import local_tensor
from orchestrator.records import checkpoint_store
from orchestrator.records.checkpoint_store import Checkpoint

VARIABLE = "ORCHESTRATOR_MEMORY_DIR"
KEPT = schema.CheckpointConfig(keep=2, copies=2, asynchronous=True)
# The share of free memory that is left to other programs and to use that is not counted.
KEPT_FREE = 0.1
# How long the end of the program waits for a save.
LEAVING_SECONDS = 5.0
# The largest share of training time for states, where the config does not set how often.
COST = 0.03


def memory_directory(name: str, every: int | None, say: Say) -> Path | None:
    """Return the directory for states that outlive the ranks, or None if there is none."""
    value = os.environ.get(VARIABLE)
    if value and every != 0:
        return Path(value, name)
    if every:
        say(
            f"checkpoint.memory_every does nothing here: {VARIABLE} is not set, which a launch"
            " with --max-restarts does"
        )
    return None


class Memory(Checkpoints):
    """Saves states in memory. A failure ends these saves, and never the training."""

    in_memory = True

    def __init__(
        self,
        where: Path,
        ranks: Ranks,
        run: TrainingRun,
        say: Say,
        *,
        node_holds_all: bool,
        every: int | None = 1,
    ) -> None:
        # The steps from one state to the next, or None to keep to COST.
        self.every = every
        self.next_at = 0.0
        # Why no more states are kept.
        self.off = ""
        # Why this rank could not keep its part of a state.
        self.lost = ""
        self._stop_if(gather_values(why_unfit(where.parent)), say)
        if self.off:
            return
        try:
            super().__init__(KEPT, where, ranks, run, say, node_holds_all=node_holds_all)
        except CheckFailed as error:
            # It is raised on all ranks.
            self._stop_if([error.what], say)
            return
        atexit.register(self._finish_writing)

    def _stop_if(self, problems: list[str], say: Say) -> None:
        """Stop keeping states if a rank has a problem. All ranks have the same list."""
        if self.off or not any(problems):
            return
        rank, self.off = next((rank, text) for rank, text in enumerate(problems) if text)
        say(
            f"WARNING: no state is kept in memory from now on: {self.off} (rank {rank}); a restart"
            " goes on from the newest checkpoint on disk"
        )

    def due(self, step: int) -> bool:
        """Return True if the config asks for a state after this step."""
        return not self.off and self.every is not None and step % self.every == 0

    def due_by_clock(self) -> bool:
        """Return True if a state costs at most COST now. Without an interval, rank 0 asks this."""
        if self.off or self.every is not None or time.monotonic() < self.next_at:
            return False
        return self.thread is None or not self.thread.is_alive()

    def save(
        self,
        step: int,
        state: Mapping[str, Tensor],
        progress: Any,
        *,
        best: bool = False,
    ) -> None:
        """Save a state, after removing the one before the last."""
        began = time.monotonic()
        self.wait()
        self._stop_if(gather_values(self.lost), self.say)
        if self.last_saved < 0 and not self.off:
            self._stop_if(gather_values(self._no_room(state)), self.say)
        if not self.off:
            # If pruning fails, the old states take memory for longer.
            with contextlib.suppress(JobFailed):
                # The state that is written now is the second.
                self.prune(1)
            super().save(step, state, progress, best=best)
            ended = time.monotonic()
            self.next_at = ended + (ended - began) / COST

    def _report(self, problem: str) -> None:
        """Note a failure, which ends these saves."""
        self.lost = problem or self.unprotected or self.lost

    def _no_room(self, state: Mapping[str, Tensor]) -> str:
        """Return why two states and copies do not fit. Report the size if they do."""
        node, host = self.ranks.nodes[self.ranks.rank]
        parts: dict[int, int] = {}
        own = sum(local_tensor(value).nbytes for value in state.values())
        for number, size in gather_values((node, own)):
            parts[number] = parts.get(number, 0) + size
        copies = 2 if self.writers.apart else 1
        need = 2 * copies * max(parts.values())
        free = min(shutil.disk_usage(self.directory).free, free_host_memory() - parts[node])
        if need > (free + bytes_in(self.directory)) * (1 - KEPT_FREE):
            return (
                f"two states of this node's ranks take {text.format_bytes(need)} of memory in"
                f" {self.directory.parent}, and {text.format_bytes(max(0, free))} are free on"
                f" {host}"
            )
        often = {None: f"for at most {COST:.0%} of the time", 1: "every step"}
        copied = ", with a copy of the node before it" if self.writers.apart else ""
        self.say(
            f"checkpoint in memory {often.get(self.every, f'every {self.every} steps')}: up to"
            f" {text.format_bytes(need)} per node for two states, in"
            f" {self.directory.parent}{copied}"
        )
        return ""

    def keep_only(self, step: int) -> None:
        """Remove all states but that of the step which the training resumed from."""
        for checkpoint in checkpoint_store.list_checkpoints(self.directory) if not self.off else ():
            if checkpoint.step != step and self.writers.publishes:
                checkpoint_store.discard_partial(checkpoint.path, checkpoint.step)

    def _is_ours(self, checkpoint: Checkpoint) -> bool:
        return True

    def end(self) -> None:
        """Close, and leave the states in memory: the launch removes them with the directory."""
        if self.off:
            return
        self.wait()
        # The registration would keep this object and its tensors alive.
        atexit.unregister(self._finish_writing)
        self.close()

    def _finish_writing(self) -> None:
        """Wait a moment for the thread before the interpreter ends."""
        if self.thread is not None:
            self.thread.join(LEAVING_SECONDS)


def bytes_in(directory: Path) -> int:
    """Return the bytes that the files below a directory take."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
