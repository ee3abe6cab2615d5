"""Choose the settings of a training: the keys that a Trainer honours, and its strategy."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchestrator.common.errors import UsageError
from orchestrator.config import parse
from orchestrator.config.parse import at_least, one_of
from orchestrator.config.schema import SHARDED, Config
from orchestrator.engine.ranks.ranks import Ranks, free_host_memory, gather

OVER_RANKS = (*SHARDED, "ddp")
STRATEGIES = ("auto", *OVER_RANKS, "dp", "none")
UNENDING = 1 << 62  # steps, where nobody has said how many

# What the script has already decided by its own objects, or the launch before the script began.
OWN = "the Trainer takes"
REFUSED = {
    "launch": "it is read by master_launch, before the script starts: --set, or its --config",
    "sync": "it is read by master_launch, before the script starts: --set, or its --config",
    "nccl": "it is read by master_launch, before the script starts: --set, or its --config",
    "env": "it is read by master_launch, before the script starts: --set, or its --config",
    "model": f"{OWN} the model itself",
    "dataset": f"{OWN} your DataLoader: train(loader)",
    "dataloader": "these are arguments of your DataLoader",
    "optimizer": f"{OWN} the optimizer itself",
    "scheduler": f"{OWN} scheduler=, and warmup_steps=",
    "training.batch_size": "the batch size is that of your DataLoader",
    "training.loss": f"{OWN} loss= or step=",
    "fsdp.sharding_strategy": f"{OWN} strategy=",
    "distributed.backend": f"{OWN} backend=",
    "logging.trackers": f"{OWN} trackers=",
    "logging.tracker_options": f"{OWN} trackers=",
}


def check_arguments(
    strategy: str, scheduler_every: str, stream: str, warmup_steps: int, log_every: int | None
) -> None:
    one_of("strategy", strategy, STRATEGIES)
    one_of("scheduler_every", scheduler_every, ("step", "epoch"))
    one_of("stream", stream, ("dealt", "own"))
    at_least("warmup_steps", warmup_steps, 0)
    at_least("log_every", log_every, 1)


def arguments(
    precision: str, accumulate: int, clip: float | None, seed: int, log_every: int | None
) -> dict[str, Any]:
    """Give the keys that the Trainer's own arguments stand for."""
    training = {"mixed_precision": precision, "gradient_accumulation": accumulate}
    training |= {"grad_clip_norm": clip or 0.0, "seed": seed, "max_steps": UNENDING}
    return {"training": training, "logging": {"interval": log_every or 50}}


def refuse_unread(keys: Mapping[str, Any]) -> None:
    """Refuse by name what a Trainer does not read: a key that is accepted is honoured."""
    for section, values in keys.items():
        if section not in REFUSED and not isinstance(values, Mapping):
            raise UsageError(f"config[{section!r}] must hold keys, not {values!r}")
        inner = values if isinstance(values, Mapping) else {}
        for name in [section, *(f"{section}.{key}" for key in inner)]:
            if name in REFUSED:
                first = next(iter(inner), None)
                shown = f"{name}.{first}" if name == section and first else name
                raise UsageError(f"config: a Trainer does not read {shown}", REFUSED[name])


def config_of(
    arguments: Mapping[str, Any], strategy: str, find_unused: bool, keys: Mapping[str, Any]
) -> Config:
    """Make the engine's config of the Trainer's arguments and the keys of its config=."""
    refuse_unread(keys)
    merged: dict[str, Any] = copy.deepcopy(dict(arguments))
    if strategy == "auto" and "fsdp" in keys:
        strategy = "hybrid_shard"  # the only one of the two that reads them
    merged["fsdp"] = {"sharding_strategy": strategy if strategy in OVER_RANKS else "ddp"}
    merged["distributed"] = {"find_unused_parameters": find_unused}
    for section, values in keys.items():
        merged.setdefault(section, {}).update(values)
    return parse.build(Config, merged)


def of_launch() -> Config | None:
    """Read what the launch resolved, from the run directory on this node; by hand there is none."""
    run = os.environ.get("ORCHESTRATOR_RUN")
    if not run:
        return None
    spec = json.loads(Path(run, "spec.json").read_text(encoding="ascii"))
    return parse.build(Config, spec["config"])


def make_deterministic(config: Config) -> None:
    """Honour training.deterministic, before anything is computed."""
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


# -- the strategy, where the user has named none ---------------------------------------------------


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
    return free_host_memory() // len(ranks.neighbours)
