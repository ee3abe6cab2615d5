"""What a Trainer makes of its arguments, and small things on the way. Called by trainer.py."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from orchestrator.config import parse
from orchestrator.config.parse import at_least, one_of
from orchestrator.config.schema import SHARDED, Config
from orchestrator.engine.models.losses import Totals
from orchestrator.engine.ranks import mesh
from orchestrator.engine.ranks.ranks import Ranks, gather, host_group
from orchestrator.engine.train import outputs_directory
from orchestrator.errors import CheckFailed, OrchestratorError, UsageError
from orchestrator.records import checkpoint_store

OVER_RANKS = (*SHARDED, "ddp")
STRATEGIES = (*OVER_RANKS, "dp", "none")


def check(
    strategy: str, scheduler_every: str, stream: str, warmup_steps: int, log_every: int
) -> None:
    one_of("strategy", strategy, STRATEGIES)
    one_of("scheduler_every", scheduler_every, ("step", "epoch"))
    one_of("stream", stream, ("dealt", "own"))
    at_least("warmup_steps", warmup_steps, 0)
    at_least("log_every", log_every, 1)


def training(precision: str, accumulate: int, clip: float | None, seed: int) -> dict[str, Any]:
    values = {"mixed_precision": precision, "gradient_accumulation": accumulate}
    return {"training": {**values, "grad_clip_norm": clip or 0.0, "seed": seed}}


def config(
    own: Mapping[str, Any], strategy: str, find_unused: bool, more: Mapping[str, Any]
) -> Config:
    """The engine's, from the Trainer's arguments; `more` has further keys of it."""
    merged: dict[str, Any] = copy.deepcopy(dict(own))
    merged["fsdp"] = {"sharding_strategy": strategy if strategy in OVER_RANKS else "ddp"}
    if strategy == "ddp":
        merged["distributed"] = {"find_unused_parameters": find_unused}
    for section, values in more.items():
        given = merged.setdefault(section, {})
        if not isinstance(values, Mapping):
            raise UsageError(f"config[{section!r}] must hold keys, not {values!r}")
        given.update(values)
    return parse.build(Config, merged)


def placed(ranks: Ranks, device: str | torch.device | None) -> Ranks:
    if device is None:
        return ranks
    if ranks.world > 1:
        raise UsageError("device= is for one process; each of several has its own", "leave it out")
    return dataclasses.replace(ranks, device=torch.device(device))


# -- the model --------------------------------------------------------------------------------


def spread(
    model: nn.Module, strategy: str, ranks: Ranks, config: Config, find_unused: bool
) -> tuple[mesh.Mesh, nn.Module]:
    """Over the ranks, with rank 0's weights; the optimizer is told of it later."""
    if any(isinstance(m, (FSDPModule, DistributedDataParallel)) for m in model.modules()):
        raise UsageError("the model is spread over the ranks already", "give the plain model")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError("the model is on the meta device and has no weights", "make it on the CPU")
    if ranks.world > 1 and strategy not in OVER_RANKS:
        raise UsageError(
            f"strategy={strategy!r} is for one process, and here are {ranks.world}: each would"
            " train a model of its own",
            'use "ddp", or "hybrid_shard" for a model that is too large for one device',
        )
    same_start(model, ranks)
    if strategy == "dp":
        return mesh.Mesh("single", copies=1), nn.DataParallel(model.to(ranks.device))
    shape = mesh.make(config, ranks)
    made = mesh.spread(model, shape, ranks, config, fill=lambda: None)
    if find_unused and shape.mesh is not None:
        for part in (m for m in model.modules() if isinstance(m, FSDPModule)):
            if not hasattr(part, "set_reduce_scatter_unused_params"):
                raise CheckFailed(
                    f"find_unused_parameters with {strategy} needs a newer torch than"
                    f" {torch.__version__}",
                    'use strategy="ddp"',
                )
            part.set_reduce_scatter_unused_params(True, recurse=False)
    return shape, made


def same_start(model: nn.Module, ranks: Ranks) -> None:
    """Users make their model in every rank, each with weights of its own: rank 0's are taken."""
    if ranks.world == 1:
        return
    own = [(name, tuple(value.shape), str(value.dtype)) for name, value in tensors(model)]
    for rank, other in enumerate(gather(own)):
        if other != own:
            mine = next((one for one in own if one not in other), own[-1:])
            raise CheckFailed(
                f"the model is not the same on all ranks: rank {ranks.rank} has {mine}, rank {rank}"
                " has not",
                "make the same model everywhere",
            )
    for _, value in tensors(model):
        told = value.data.contiguous()
        dist.broadcast(told, 0, group=host_group() if told.device.type == "cpu" else None)
        value.data.copy_(told)


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def words(
    model: nn.Module, shape: mesh.Mesh, ranks: Ranks, lr_scale: float, warmup: int
) -> list[str]:
    lines = mesh.picture(shape, ranks)
    if isinstance(model, nn.DataParallel):
        lines = [
            f"dp: one process splits every batch over {max(1, len(model.device_ids))} devices;"
            " ddp, with a process per device, is faster: Trainer.launch(function, nprocs=N) or"
            ' torchrun, and strategy="ddp"'
        ]
    if lr_scale != 1:
        lines.append(f"learning rates are multiplied by {lr_scale:g}, the number of ranks")
    if warmup:
        lines.append(f"learning rates rise from zero over the first {warmup} steps")
    return lines


# -- the learning rate ------------------------------------------------------------------------


def scheduler(made: Any, optimizer: torch.optim.Optimizer) -> Any:
    """One of torch's over the optimizer, or a function of it."""
    if made is None or hasattr(made, "step"):
        if getattr(made, "optimizer", optimizer) is not optimizer:
            raise UsageError("the scheduler belongs to another optimizer than the Trainer's")
        return made
    return made(optimizer)


def step_epoch(made: Any, metrics: Mapping[str, float]) -> None:
    if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau):
        made.step(metrics["loss"])
    else:
        made.step()


def state_of(made: Any) -> Any:
    """As JSON keeps it: a checkpoint's progress is written so."""
    return None if made is None else {k: v for k, v in made.state_dict().items() if plain(v)}


def plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


# -- sums -------------------------------------------------------------------------------------


def add(sums: dict[str, Tensor], found: Totals, real: bool) -> None:
    for name, (total, count) in found.items():
        pair = torch.stack([total.detach().double(), count.to(total.device).double()])
        pair = pair if real else torch.zeros_like(pair)
        sums[name] = sums[name] + pair if name in sums else pair


def add_floats(to: dict[str, list[float]], sums: Mapping[str, Sequence[float]]) -> None:
    for name, (total, count) in sums.items():
        before = to.setdefault(name, [0.0, 0.0])
        to[name] = [before[0] + total, before[1] + count]


def same_names(own: list[str]) -> None:
    for rank, other in enumerate(gather(own)):
        if other != own:
            raise UsageError(
                f"the step gives {', '.join(own)} on this rank, {', '.join(other)} on rank {rank}",
                "give the same metrics everywhere",
            )


def line(begin: str, values: Mapping[str, float]) -> str:
    shown = [f"{name} {value:.3g}" if name == "lr" else f"{name} {value:.4f}"
             for name, value in values.items()]  # fmt: skip
    return "  ".join([begin, *shown])


# -- places -----------------------------------------------------------------------------------


def own_directory() -> Path:
    outputs = outputs_directory()
    return outputs / "checkpoints" if outputs else Path("checkpoints")


def saved_steps(path: Path) -> list[int]:
    """What was saved last comes first: steps of an older run may be higher.

    Asked before anything is made: a wrong path must not leave an empty directory behind.
    """
    found: list[checkpoint_store.Checkpoint] = []
    problem: tuple[str, str] | None = None
    if path.is_file():
        problem = (
            f"{path} is a file, and a checkpoint of several ranks is a directory",
            "weights from torch.save: model.load_state_dict(torch.load(FILE)) before the Trainer",
        )
    else:
        try:
            found = checkpoint_store.resolve(str(path))
        except OrchestratorError as error:
            problem = (error.what, error.fix)
    for rank, told in enumerate(gather(problem)):
        if told is not None:
            raise UsageError(f"rank {rank}: {told[0]}" if problem is None else told[0], told[1])
    newest = sorted(found, key=lambda one: one.created, reverse=True)
    return gather([one.step for one in newest])[0]


def refuse_later(path: Path, step: int) -> None:
    """Saved beside them, new ones would be the oldest, and the first to be taken away."""
    later = max((one.step for one in checkpoint_store.every(path)), default=0)
    for one in gather(later):
        if one > step:
            raise UsageError(
                f"{path} holds step {one} of another run, and this one is at step {step}",
                "resume=True goes on from it; save_to= names another directory",
            )
