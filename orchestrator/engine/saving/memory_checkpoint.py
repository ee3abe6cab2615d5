"""Keep the state of a script's own loop in memory, and go on from it after a restart of the ranks.

    state = orchestrator.load_memory_checkpoint()   # None at the first start
    ...
    orchestrator.memory_checkpoint({"model": model.state_dict(), "step": step})

It works without the Trainer, under any launcher that sets ORCHESTRATOR_RESUME_DIR.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.common.errors import UsageError
from orchestrator.engine.ranks.ranks import Ranks, gather, nodes_of_ranks, say_once
from orchestrator.engine.saving import memory
from orchestrator.engine.saving.loading import Target, resume
from orchestrator.engine.saving.memory import Memory
from orchestrator.engine.saving.ownership import Run
from orchestrator.engine.saving.values import DTYPES, decoded, encoded


def memory_checkpoint(
    state: Mapping[str, Any], step: int | None = None, *, replicated: bool = False
) -> None:
    """Keep this rank's state in memory; every rank calls it, after the same steps.

    It returns when the state is copied; the rest happens beside the next step. A step that is left
    out counts the calls. Tensors, numbers, texts, bytes, and lists, tuples and dicts of them are
    kept as they are. A replicated state is the same on all ranks, as under DDP: each node keeps it
    once, and any number of ranks goes on from it. Where the launch gave no memory that outlives the
    ranks, it does nothing but to say so.
    """
    opened = _opened(replicated)
    if opened is None:
        return
    store, mine = opened.store, opened.name
    tensors: dict[str, Tensor] = {}
    text = encoded(dict(state), tensors, mine)
    texts = dict(gather((mine, text)))
    shapes = dict(gather((mine, {n: (str(t.dtype), [*t.shape]) for n, t in tensors.items()})))
    step = opened.step + 1 if step is None else step
    opened.step = step
    progress = {"stepper": {"texts": texts, "shapes": shapes}, "run": vars(store.run)}
    if not store.off:
        store.save(step, tensors, progress)


def load_memory_checkpoint(*, replicated: bool = False) -> dict[str, Any] | None:
    """Return this rank's state as an earlier attempt of the job kept it last, on the CPU.

    None at the first start, or where no state is whole over all ranks. Every rank calls it, and
    says `replicated` as memory_checkpoint() does.
    """
    opened = _opened(replicated)
    return None if opened is None else opened.found


@dataclass
class Opened:
    """The states of a script in memory, and the one that it goes on from."""

    store: Memory
    name: str  # of this rank's state
    found: dict[str, Any] | None
    step: int


class Script:
    """The state of a rank as a checkpoint has it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: dict[str, Tensor] = {}
        self.found: dict[str, Any] | None = None

    def prime(self, progress: Mapping[str, Any]) -> Mapping[str, Tensor]:
        shapes = progress["shapes"].get(self.name, {})
        self.tensors = {
            name: torch.empty(shape, dtype=DTYPES[kind]) for name, (kind, shape) in shapes.items()
        }
        return self.tensors

    def restore(self, progress: Mapping[str, Any]) -> None:
        self.found = decoded(progress["texts"][self.name], self.tensors)


_OPEN: dict[Any, tuple[bool, Opened | None]] = {}


def _opened(replicated: bool) -> Opened | None:
    """Open the memory once for each process group, and find what is there."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "a state is kept in memory by all ranks together, and they have no process group yet",
            "torch.distributed.init_process_group() comes first",
        )
    group = dist.group.WORLD if dist.is_initialized() else None
    if group not in _OPEN:
        _OPEN[group] = replicated, _open(replicated)
    before, opened = _OPEN[group]
    if before != replicated:
        raise UsageError(
            "memory_checkpoint() and load_memory_checkpoint() differ in whether all ranks have the"
            " same state",
            "say replicated=True in both, or in neither",
        )
    return opened


def _open(replicated: bool) -> Opened | None:
    nodes = nodes_of_ranks()
    rank, world = (dist.get_rank() if dist.is_initialized() else 0), len(nodes)
    ranks = Ranks(rank, world, 0, torch.device("cpu"), nodes)

    def say(text: str) -> None:
        if rank == 0:
            say_once(text)

    place = memory.place("script", None, say)
    if place is None:
        say(f"no state is kept in memory: {memory.VARIABLE} is not set, which a launch with"
            " --max-restarts does")  # fmt: skip
        return None
    layout = "the same on all ranks" if replicated else f"{world} ranks"
    run = Run("script", Path(sys.argv[0]).name or "python", model=layout)
    name = "state" if replicated else f"state of rank {rank}"
    script = Script(name)
    target = Target(ranks, run, torch.nn.Module(), script, lambda progress: None, say)
    loaded = resume(None, target, place, memory=place)
    step = loaded.step if loaded is not None else 0
    store = Memory(place, ranks, run, say, node_holds_all=replicated)
    if not store.off:
        store.keep_only(step)
    return Opened(store, name, script.found, step)
