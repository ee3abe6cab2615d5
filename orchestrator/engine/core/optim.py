"""From summed gradients to a step: norm, clip, skip, learning rate. Called by train.py.

Every number that all ranks must agree on travels in one small message per step, and nothing here
waits for the device: whether a step was skipped, the host learns when it next looks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from orchestrator.config.schema import Config, Scheduler
from orchestrator.engine.ranks.mesh import Mesh

FIRST_SCALE = 2.0**16  # of fp16 losses, as in torch.amp
GROW_AFTER = 2000  # good steps


@dataclass(frozen=True)
class Report:
    """What one step came to, still on the device."""

    loss: Tensor  # mean over all things counted, on all ranks
    grad_norm: Tensor  # of the mean loss, before clipping
    count: Tensor  # tokens, or samples
    bad: Tensor  # 1.0 where the step was skipped
    bad_in_a_row: Tensor


class Stepper:
    """The optimizer of this rank's shards.

    It works on the local tensors, not on DTensors: what it does is elementwise, so that sharding
    needs no thought, and the dispatch of DTensors costs more host time than the step itself.
    """

    def __init__(self, config: Config, model: nn.Module, mesh: Mesh, nominal: float) -> None:
        self.config, self.mesh = config, mesh
        self.nominal = nominal  # things counted in a step, if all are: keeps sums near one
        self.named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.locals = [local(parameter) for _, parameter in self.named]
        self.device = self.locals[0].device
        self.optimizer = self._make()
        low = config.training.mixed_precision == "fp16"
        self.scale = torch.tensor(FIRST_SCALE if low else 1.0, device=self.device)
        self.good = torch.zeros((), device=self.device)
        self.skipped = torch.zeros((), device=self.device)
        self.bad_in_a_row = torch.zeros((), device=self.device)

    def _make(self) -> torch.optim.Optimizer:
        wanted = self.config.optimizer
        # A norm's scale or a bias has no reason to be small.
        decays = [p for p in self.locals if p.dim() >= 2]
        others = [p for p in self.locals if p.dim() < 2]
        groups = [
            {"params": decays, "weight_decay": wanted.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if wanted.name == "adamw":
            return torch.optim.AdamW(
                groups, lr=wanted.lr, betas=wanted.betas, eps=wanted.eps, fused=True
            )
        return torch.optim.SGD(groups, lr=wanted.lr, momentum=wanted.momentum, fused=True)

    def scaled(self, loss: Tensor) -> Tensor:
        """A sum of losses, brought to a size whose gradients low precision can hold."""
        undo = self.mesh.copies if self.mesh.strategy == "ddp" else 1  # ddp averages over the ranks
        return loss * (self.scale.to(loss.device) * (undo / self.nominal))

    def add_up(self, loss: Tensor, count: Tensor) -> Tensor:
        """Over all ranks: squares of the gradients, losses, how much was counted. One message."""
        self._take_gradients()
        told = [loss.detach().double().to(self.device), count.double().to(self.device)]
        sums = torch.stack([self._squares(), *told])
        if self.mesh.strategy != "single":
            dist.all_reduce(sums)
        return sums

    def step(self, step: int, sums: Tensor) -> Report:
        squares, loss, count = sums.unbind()
        # What was summed is scale / nominal times the gradient of the sum of all losses.
        to_mean = self.nominal / (self.scale.double() * count)
        norm = (squares / self.mesh.copies).sqrt() * to_mean  # every copy has counted them all
        most = self.config.training.grad_clip_norm
        factor = to_mean * (most / (norm + 1e-6)).clamp(max=1.0) if most else to_mean
        bad = 1.0 - (norm.isfinite() & loss.isfinite()).float()

        for group in self.optimizer.param_groups:
            group["lr"] = self.lr(step)
        # The fused kernels divide by the one and do nothing at all where the other is set.
        self.optimizer.grad_scale = (1.0 / factor).float()  # type: ignore[attr-defined]
        self.optimizer.found_inf = bad  # type: ignore[attr-defined]
        self.optimizer.step()
        for (_, parameter), own in zip(self.named, self.locals, strict=True):
            parameter.grad = own.grad = None
        self._count(bad)
        return Report(loss / count, norm, count, bad, self.bad_in_a_row.clone())

    def _take_gradients(self) -> None:
        """The shards, as FSDP has them now: it may have moved them in its first forward."""
        for (_, parameter), own in zip(self.named, self.locals, strict=True):
            if own is parameter:
                continue
            own.data = local_tensor(parameter)
            own.grad = None if parameter.grad is None else local_tensor(parameter.grad)

    def _squares(self) -> Tensor:
        grads = [own.grad for own in self.locals if own.grad is not None and own.numel()]
        if not grads:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        norms = torch._foreach_norm(grads)
        return torch.stack(norms).double().square().sum()

    def _count(self, bad: Tensor) -> None:
        self.skipped += bad
        if self.config.training.mixed_precision != "fp16":
            self.bad_in_a_row = (self.bad_in_a_row + 1) * bad
            return
        # An overflow only says that the scale is too large, until there is nothing left to halve.
        lost = bad * (self.scale <= 1.0)
        self.bad_in_a_row = (self.bad_in_a_row + 1) * lost
        self.good = (self.good + 1) * (1 - bad)
        grow = 1.0 + (self.good >= GROW_AFTER).float()
        self.good *= self.good < GROW_AFTER
        self.scale = (self.scale * (1 - bad / 2) * grow).clamp(1.0, 2.0**24)

    def lr(self, step: int) -> float:
        training = self.config.training
        ratio = schedule(self.config.scheduler, step, training.max_steps)
        return self.config.optimizer.lr * ratio

    # -- what a checkpoint holds of it ----------------------------------------------------------

    def prime(self, progress: Mapping[str, Any]) -> None:
        """Make the state that a first step would make, so that a checkpoint can be read into it."""
        for own in self.locals:
            own.grad = torch.zeros_like(own)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.optimizer.step()
        for own in self.locals:
            own.grad = None

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """By the names of the parameters, sharded as they are."""
        for (name, parameter), own in zip(self.named, self.locals, strict=True):
            for key, value in self.optimizer.state[own].items():
                if isinstance(value, Tensor):
                    yield f"{name}.{key}", sharded_like(parameter, value)

    def progress(self) -> dict[str, float]:
        return {"scale": self.scale.item(), "good": self.good.item(), "bad": self.skipped.item()}

    def restore(self, progress: Mapping[str, Any]) -> None:
        if self.config.training.mixed_precision == "fp16":
            self.scale.fill_(progress["scale"])
        self.good.fill_(progress["good"])
        self.skipped.fill_(progress["bad"])


def local(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(local_tensor(parameter)) if isinstance(parameter, DTensor) else parameter


def local_tensor(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(parameter: Tensor, value: Tensor) -> Tensor:
    """A tensor that lies beside a parameter's own shard, as the whole that it is a part of."""
    if not isinstance(parameter, DTensor) or value.dim() == 0:
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def schedule(config: Scheduler, step: int, max_steps: int) -> float:
    """Of the highest learning rate, what step 1, 2, ... gets. No state: a resume needs none."""
    total = config.total_steps or max_steps
    warmup = max(1, total // 20) if config.warmup_steps is None else config.warmup_steps
    if step <= warmup:
        return step / warmup
    if config.name == "constant":
        return 1.0
    start = warmup
    if config.name == "wsd":
        start = max(warmup, total - (config.decay_steps or max(1, total // 5)))
    done = min(1.0, max(0.0, (step - start) / max(1, total - start)))
    low = config.min_lr_ratio
    if config.name == "cosine":
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))
    return 1.0 - (1 - low) * done
