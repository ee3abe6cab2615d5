"""Keep the state of a script's own loop in memory, and go on from it after a restart of the ranks.

    state = orchestrator.load_memory_checkpoint()   # None at the first start
    ...
    orchestrator.memory_checkpoint({"model": model.state_dict(), "step": step})

It works without the Trainer, under any launcher that sets ORCHESTRATOR_RESUME_DIR.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.engine.saving.in_memory.encoding import decoded, encoded
from orchestrator.engine.saving.in_memory.memory import (
    VARIABLE,
    Memory,
    directory,
    rank_and_world,
)
from orchestrator.engine.saving.in_memory.search import Found

TIMEOUT_SECONDS = 600.0  # that a rank waits for the others


def memory_checkpoint(
    state: Mapping[str, Any], step: int | None = None, *, replicated: bool = False
) -> None:
    """Keep this rank's state in memory; every rank calls it, after the same steps.

    It returns when the state is copied; the rest happens beside the next step. A step that is left
    out counts the calls. Tensors, numpy's arrays, numbers, texts, and lists, tuples and dicts of
    them are kept as they are. A replicated state is the same on all ranks, as under DDP: each node
    keeps it once, and any number of ranks goes on from it. Where the launch gave no memory that
    outlives the ranks, it does nothing but to say so.
    """
    opened = _opened(replicated)
    if opened is None:
        return
    memory, found = opened
    tensors: dict[str, Tensor] = {}
    rest = json.dumps(encoded(state, tensors, "state"))
    if step is None:
        step = (found.notes.step if found is not None else 0) + memory.turn + 1
    memory.save(step, tensors, rest)
    memory.settle()


def load_memory_checkpoint(*, replicated: bool = False) -> dict[str, Any] | None:
    """Return this rank's state as an earlier attempt of the job kept it last, on the CPU.

    None at the first start, or where no state is whole over all ranks. Every rank calls it, and
    says `replicated` as memory_checkpoint() does.
    """
    opened = _opened(replicated)
    if opened is None or opened[1] is None:
        return None
    found = opened[1]
    try:
        content: dict[str, Any] = decoded(json.loads(found.notes.rest), found.tensors_here())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckFailed(f"what is in memory is none of a script's states ({error})") from None
    return content


def _opened(replicated: bool) -> tuple[Memory, Found | None] | None:
    """Open the memory once for each process group, and find what is there."""
    rank, world = rank_and_world()
    group = dist.group.WORLD if world > 1 else None
    if (rank, world, group) not in _OPEN:
        _OPEN[rank, world, group] = replicated, _open(rank, world, replicated)
    before, opened = _OPEN[rank, world, group]
    if before != replicated:
        raise UsageError(
            "memory_checkpoint() and load_memory_checkpoint() differ in whether all ranks have the"
            " same state",
            "say replicated=True in both, or in neither",
        )
    return opened


_OPEN: dict[Any, tuple[bool, tuple[Memory, Found | None] | None]] = {}


def _open(rank: int, world: int, replicated: bool) -> tuple[Memory, Found | None] | None:
    def say(text: str) -> None:
        if rank == 0:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    where = directory()
    if where is None:
        say(f"no state is kept in memory: {VARIABLE} is not set, which a launch with --max-restarts"
            " does")  # fmt: skip
        return None
    layout = "the same on all ranks" if replicated else f"{world} ranks"
    header = {"program": Path(sys.argv[0]).name or "python", "layout": layout}
    shard = 0 if replicated else rank
    memory = Memory(where, "script", shard, header, layout, say, timeout=TIMEOUT_SECONDS)
    found = memory.find()
    if found is not None:
        say(f"going on after step {found.notes.step}, from memory ({where})")
    return memory, found
