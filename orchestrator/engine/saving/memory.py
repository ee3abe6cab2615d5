"""Keep the newest states of all ranks in memory, beside the compute, for a restart of the ranks.

They are checkpoints in a directory below $ORCHESTRATOR_RESUME_DIR, which is in memory and outlives
the ranks. A shard that only one node holds is also kept by the next node.
"""

from __future__ import annotations

import atexit
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from orchestrator.common import text
from orchestrator.common.errors import CheckFailed
from orchestrator.common.permissions import others
from orchestrator.common.text import Say
from orchestrator.config import schema
from orchestrator.engine.ranks.ranks import Ranks, free_host_memory, gather
from orchestrator.engine.saving.checkpoint import Checkpoints, local_of
from orchestrator.engine.saving.ownership import Run
from orchestrator.engine.saving.pace import Pace
from orchestrator.records import checkpoint_store
from orchestrator.records.checkpoint_store import Checkpoint

VARIABLE = "ORCHESTRATOR_RESUME_DIR"
KEPT = schema.Checkpoint(keep=2, copies=2, asynchronous=True)
KEPT_FREE = 0.1  # of what is free now: for others, and for what is not counted
LEAVING_SECONDS = 5.0  # at the end of the program


def place(name: str, every: int | None, say: Say) -> Path | None:
    """Return where a training's states outlive the ranks; None where there is no such place."""
    value = os.environ.get(VARIABLE)
    if value and every != 0:
        return Path(value, name)
    if every:
        say(f"checkpoint.memory_every does nothing here: {VARIABLE} is not set, which a launch"
            " with --max-restarts does")  # fmt: skip
    return None


def unfit(where: Path) -> str:
    """Say why states cannot be kept below a directory, or return nothing."""
    try:
        status = where.lstat()
    except OSError as error:
        return f"{where}: {error.strerror}"
    if not where.is_dir() or where.is_symlink():
        return f"{where} is not a directory"
    who = others(status)
    return f"{where} {who}" if who else ""


class Memory(Checkpoints):
    """States in memory. They cost room and time, and never end a training."""

    in_memory = True

    def __init__(
        self, where: Path, ranks: Ranks, run: Run, say: Say, *,
        node_holds_all: bool, every: int | None = 1,
    ) -> None:  # fmt: skip
        self.pace = Pace(every)
        self.off = ""  # why nothing is kept any more
        self.lost = ""  # why this rank could not keep its part of a state
        self._stop_if(gather(unfit(where.parent)), say)
        if self.off:
            return
        try:
            super().__init__(KEPT, where, ranks, run, say, node_holds_all=node_holds_all)
        except CheckFailed as error:  # on all ranks
            self._stop_if([error.what], say)
            return
        atexit.register(self._finish_writing)

    def _say_what_is_kept(self) -> None:
        """The first state says it, with its size."""

    def _stop_if(self, problems: list[str], say: Say) -> None:
        """Keep nothing from now on if a rank cannot: all ranks hear of it."""
        if self.off or not any(problems):
            return
        rank, self.off = next((rank, text) for rank, text in enumerate(problems) if text)
        say(
            f"WARNING: no state is kept in memory from now on: {self.off} (rank {rank}); a restart"
            " goes on from the newest checkpoint on disk"
        )

    def due(self, step: int) -> bool:
        """Return True if a state is kept after this step: on all ranks the same."""
        self.pace.begin_step()
        if self.off:
            return False
        if self.pace.every is None and self.thread is not None:
            self.wait()
            self.pace.measure(self.this_save[2])
        return self.pace.due(step, self.say)

    def save(
        self,
        step: int,
        state: Mapping[str, Tensor],
        progress: Any,
        *,
        frozen: Collection[str] = (),
        best: bool = False,
    ) -> None:
        """Keep a state in the place of the one before the last."""
        self.wait()
        self._stop_if(gather(self.lost), self.say)
        if self.last_saved < 0 and not self.off:
            self._stop_if(gather(self._no_room(state)), self.say)
        if not self.off:
            self.prune(1)  # what is written now is the second
            super().save(step, state, progress, frozen=frozen, best=best)
            self.pace.stalls.append(self.stalled)

    def _report(self, problem: str) -> None:
        """Say nothing of each: a failure ends them, and end() sums them up."""
        self.lost = problem or self.unprotected or self.lost

    def _no_room(self, state: Mapping[str, Tensor]) -> str:
        """Say what this node lacks for two states and their copy, beside those that are there."""
        sharded = [tensor for tensor in state.values() if isinstance(tensor, DTensor)]
        alike = bytes_of(t for t in state.values() if not isinstance(t, DTensor))
        node, host = self.ranks.nodes[self.ranks.rank]
        shards: dict[int, int] = {}
        for number, size in gather((node, bytes_of(map(local_of, sharded)))):
            shards[number] = shards.get(number, 0) + size
        order = sorted(shards)
        kept = {node, order[order.index(node) - 1]} if self.writers.apart else set()
        size = sum(shards[number] for number in kept) if kept else bytes_of(sharded)
        copied = shards[node] + alike * len(self.ranks.neighbours)
        have = bytes_in(self.directory)
        free = {
            "free there": shutil.disk_usage(self.directory).free,
            "available": free_host_memory() - copied,
        }
        what, least = min(free.items(), key=lambda item: item[1])
        need = 2 * (size + alike)
        if need - have <= least * (1 - KEPT_FREE):
            self._say_size(need)
            return ""
        return (
            f"two states of this node's ranks take {text.size(need)} of memory in"
            f" {self.directory.parent}, and {text.size(max(0, least + have))} are {what} on {host}"
        )

    def _say_size(self, size: int) -> None:
        every, copied = self.pace.every, ""
        if self.writers.apart:
            copied = ", with a copy of the node before it"
        elif len(self.writers.members) < self.ranks.world:
            copied = ", already replicated: no extra traffic"
        often = f"every {every} steps" if every and every > 1 else "every step"
        self.say(
            f"checkpoint in memory {often}: up to {text.size(size)} per node for two states, in"
            f" {self.directory.parent}{copied}"
        )

    def keep_only(self, step: int) -> None:
        """Remove all but the state that the training has gone on from, if it is one of these."""
        for checkpoint in checkpoint_store.every(self.directory) if not self.off else ():
            if checkpoint.step != step and self.writers.publishes:
                checkpoint_store.discard(checkpoint.path, checkpoint.step)

    def _is_ours(self, checkpoint: Checkpoint) -> bool:
        return True

    def distrust(self, after: int) -> None:
        """Remove the states of later steps, and publish none that is still written."""
        if self.off:
            return
        with self.publishing:
            self.trusted = after
            for checkpoint in checkpoint_store.every(self.directory):
                if checkpoint.step > after and self.writers.publishes:
                    checkpoint_store.discard(checkpoint.path, checkpoint.step)

    def end(self) -> None:
        """Leave the states where they are: the launch removes them with the directory."""
        if self.off:
            return
        self.wait()
        atexit.unregister(self._finish_writing)  # which would hold all this for good
        self.close()
        if summary := self.pace.summary():
            self.say(summary)

    def _finish_writing(self) -> None:
        """Let the thread finish before the interpreter ends, but wait for no rank that is gone."""
        if self.thread is not None:
            self.thread.join(LEAVING_SECONDS)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def bytes_in(directory: Path) -> int:
    """Return what files of ours take there already."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
