"""Choose how to spread a model whose user has not: ddp where it fits, else hybrid_shard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchestrator.engine.ranks.ranks import Ranks, gather

SHARE = 0.5  # of a device's memory; the rest is for activations, and for what others hold
TRAINED = 4  # weights, gradients and two moments, as large as each other


def choose(model: nn.Module, ranks: Ranks, keys: Mapping[str, Any]) -> tuple[str, str]:
    """Return the strategy, the same on all ranks, and a sentence that says why."""
    if "fsdp" in keys:
        return "hybrid_shard", "strategy: hybrid_shard, because config= has keys of fsdp"
    needed = sum(p.nbytes * (TRAINED if p.requires_grad else 1) for p in model.parameters())
    needed += sum(buffer.nbytes for buffer in model.buffers())
    memory = min(gather(memory_of(ranks)))
    sizes = f"training takes {needed / 1e9:,.1f} of a device's {memory / 1e9:,.1f} GB"
    if needed <= memory * SHARE:
        return "ddp", f"strategy: ddp, the fastest for a model that fits: {sizes}"
    return "hybrid_shard", f"strategy: hybrid_shard, since a whole copy is too large: {sizes}"


def memory_of(ranks: Ranks) -> int:
    """Return the bytes of this rank's GPU, or its part of the host's memory that is free."""
    if ranks.device.type == "cuda":
        return int(torch.cuda.get_device_properties(ranks.device).total_memory)
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return (free << 10) // len(ranks.neighbours)
