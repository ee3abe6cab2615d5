"""From summed gradients to a step: norm, clip, skip, loss scale, learning rate.

Every number that all ranks must agree on travels in one small message per step. On the fused path
nothing here waits for the device: whether a step was skipped, the host learns when it next looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.config.schema import Training
from orchestrator.engine.core.optimizer import (
    HOW,
    Factory,
    bound,
    can_fuse,
    copy_of,
    is_summed,
    local_parameter,
    local_state,
    set_lr,
    settings_of,
)
from orchestrator.engine.observe.reporter import StepReport
from orchestrator.engine.ranks import plain_names
from orchestrator.engine.ranks.ranks import told_by_first
from orchestrator.engine.sharding.blocks import has_sparse, sum_whole
from orchestrator.engine.sharding.mesh import Mesh, local_tensor, sharded_like, sharding_explained

Sums = Mapping[str, tuple[Tensor, Tensor]]

FIRST_SCALE = 2.0**16  # of fp16 losses, as in torch.amp
LARGEST_SCALE = 2.0**24
GROW_AFTER = 2000  # good steps


def names_of(model: nn.Module) -> dict[int, str]:
    """Map each parameter's id to its name; to be called before the model is sharded."""
    return {id(parameter): name for name, parameter in plain_names.parameters(model)}


class Stepper:
    """Any torch optimizer, on the parameters as they are spread over the ranks.

    There are two paths. torch's own AdamW, Adam and SGD work on the local tensors of this rank, by
    their fused kernels: what they do is elementwise, so that sharding needs no thought, and the
    dispatch of DTensors costs more host time than the step itself. Every other optimizer works on
    the DTensors (so that one that is not elementwise is either right or refuses), and the host
    waits to know whether the step is to be skipped.
    """

    def __init__(
        self,
        optimizer: Optimizer | Factory,
        names: Mapping[int, str],
        model: nn.Module,
        mesh: Mesh,
        training: Training,
        *,
        lr_factor: Callable[[int], float] = lambda step: 1.0,
        nominal: float | None = None,  # things counted in a step, if all are: keeps sums near one
        keeps_settings: bool = False,  # on a resume: the learning rate, weight decay ... of today
    ) -> None:
        self.mesh, self.training, self.lr_factor = mesh, training, lr_factor
        self.keeps_settings = keeps_settings
        self.parameters = dict(plain_names.parameters(model))
        self.optimizer = bound(optimizer, names, self.parameters)
        self.initial_settings = settings_of(self.optimizer)
        chosen = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        self.named = [(name, p) for name, p in self.parameters.items() if id(p) in chosen]
        self.left = [p for p in self.parameters.values() if not is_summed(p, mesh)]
        self.fused = can_fuse(self.optimizer) and not has_sparse(model)
        self.locals = self._to_local() if self.fused else [p for _, p in self.named]
        self.device = local_tensor(next(iter(self.parameters.values()))).device
        self.scaling = training.mixed_precision == "fp16"
        self.nominal = nominal
        self.scale = torch.tensor(FIRST_SCALE if self.scaling else 1.0, device=self.device)
        self.good, self.skipped, self.bad_in_a_row = (
            torch.zeros((), device=self.device) for _ in range(3)
        )

    @property
    def whole(self) -> list[nn.Parameter]:
        """The parameters whose gradients nobody sums but this class: sharding leaves some whole,
        and ddp knows only those that were trained when it was made, not what is unfrozen later."""
        return [parameter for parameter in self.left if parameter.requires_grad]

    def _to_local(self) -> list[nn.Parameter]:
        """Exchange the optimizer's parameters, and their state, for the local parts."""
        optimizer = self.optimizer
        locals_ = {p: local_parameter(p) for _, p in self.named}
        for group in optimizer.param_groups:
            group["params"] = [locals_[p] for p in group["params"]]
            group["fused"], group["foreach"] = True, False
        for whole, part in locals_.items():
            if state := optimizer.state.pop(whole, None):
                optimizer.state[part] = {key: local_state(v, part) for key, v in state.items()}
        return list(locals_.values())

    # -- a step -------------------------------------------------------------------------------

    def scaled(self, loss: Tensor, count: Tensor, *, real: bool = True) -> Tensor:
        """Bring a sum of losses to a size whose gradients low precision can hold."""
        if self.nominal is None:
            self.nominal = self._usual_count(count)
        return loss * (self.scale.to(loss.device) * (real / self.nominal))

    def _usual_count(self, count: Tensor) -> float:
        """Take once what rank 0 counts in its first micro-batch.

        So a hook sees the gradients of a mean, as in a plain loop. fp16 takes what a whole step
        will count, as a power of two, which rounds none of the gradients.
        """
        usual = told_by_first(float(count))
        if not self.scaling:
            return usual or 1.0
        total = usual * dist.get_world_size() * self.training.gradient_accumulation
        return float(2.0 ** math.ceil(math.log2(max(1.0, total))))

    def add_up(self, sums: Sums, used: int = 0) -> Tensor:
        """Add up over all ranks: squares of the gradients, then a sum and a count per name; last, 1
        if the ranks used other parts of the model, so that they were summed with each other."""
        self._refuse_new_groups()
        sum_whole(self.whole)
        self._take_gradients()
        flat = [value.to(self.device) for pair in sums.values() for value in pair]
        squared = torch.tensor([used, used**2], dtype=torch.float64).to(self.device)
        total = torch.cat([torch.stack([self._squares(), *flat]), squared])
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        # Equal numbers alone have the mean of their squares for the square of their mean.
        apart = (total[-1] * dist.get_world_size() != total[-2] ** 2).double()
        return torch.cat([total[:-2], apart[None]])

    def _refuse_new_groups(self) -> None:
        if sum(len(group["params"]) for group in self.optimizer.param_groups) != len(self.named):
            raise UsageError(
                "the optimizer was given other parameters after the Trainer was made",
                "give it all of them from the start: those that are frozen (requires_grad=False)"
                " stay as they are until a hook unfreezes them",
            )

    def step(self, step: int, names: tuple[str, ...], total: Tensor) -> StepReport:
        squares, loss, count = total[:3].unbind()
        # What was summed is scale / nominal times the gradient of the sum of all losses.
        to_mean = (self.nominal or 1.0) / (self.scale.double() * count)
        norm = (squares / self.mesh.copies).sqrt() * to_mean  # every copy has counted them all
        most = self.training.grad_clip_norm
        factor = to_mean * (most / (norm + 1e-6)).clamp(max=1.0) if most else to_mean
        apart = total[-1].float()
        bad = torch.maximum(1.0 - (norm.isfinite() & loss.isfinite()).float(), apart)
        lr = self._apply(factor, bad, self.lr_factor(step))
        self._forget()
        self._count(bad, count)
        in_a_row = self.bad_in_a_row.clone()
        return StepReport(step, names, total[1:-1], norm, bad, in_a_row, apart, lr)

    def _apply(self, factor: Tensor, bad: Tensor, lr_factor: float) -> float | Tensor:
        groups = self.optimizer.param_groups
        base = [copy_of(group["lr"]) for group in groups]
        for group, lr in zip(groups, base, strict=True):
            set_lr(group, lr * lr_factor)
        if self.fused:
            # The fused kernels divide by the one and do nothing at all where the other is set.
            self.optimizer.grad_scale = (1.0 / factor).float()  # type: ignore[attr-defined]
            self.optimizer.found_inf = bad  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not bad.item():
            self._multiply(factor.item())
            with sharding_explained(self.mesh, type(self.optimizer).__name__):
                self.optimizer.step()
        for group, lr in zip(groups, base, strict=True):
            set_lr(group, lr)  # a scheduler of the user's reckons with its own
        first: float | Tensor = base[0] * lr_factor
        return first

    def _multiply(self, factor: float) -> None:
        dense = []
        for parameter in self.locals:
            grad = parameter.grad
            if grad is not None and grad.is_sparse:  # not in place: that would change a copy
                parameter.grad = torch.mul(grad, factor)
            elif grad is not None:
                dense.append(local_tensor(grad))
        if dense:
            torch._foreach_mul_(dense, factor)

    def _take_gradients(self) -> None:
        """Take the shards as FSDP has them now: it may have moved them in its first forward."""
        if not self.fused:
            return
        for (_, parameter), local in zip(self.named, self.locals, strict=True):
            if local is parameter:
                continue
            local.data = local_tensor(parameter)
            local.grad = None if parameter.grad is None else local_tensor(parameter.grad)

    def _squares(self) -> Tensor:
        whole = {id(parameter) for parameter in self.whole}
        grads = {
            local: local_tensor(local.grad)
            for local in self.locals
            if local.grad is not None and local.grad.numel()
        }
        sharded = squares_of([grad for local, grad in grads.items() if id(local) not in whole])
        if not whole:
            return sharded.to(self.device)
        # Each copy counts its shards once, but all ranks have these.
        once = squares_of([grad for local, grad in grads.items() if id(local) in whole])
        share = self.mesh.copies / dist.get_world_size()
        return sharded.to(self.device) + once.to(self.device) * share

    def _forget(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        for local in self.locals:
            local.grad = None

    def _count(self, bad: Tensor, count: Tensor) -> None:
        self.skipped += bad
        lost = bad * (count > 0)  # else nothing was wrong: none of its targets counts
        if not self.scaling:
            self.bad_in_a_row = (self.bad_in_a_row + lost) * bad
            return
        # An overflow only says that the scale is too large, until there is nothing left to halve.
        curable = lost * (self.scale > 1.0)
        self.bad_in_a_row = (self.bad_in_a_row + lost - curable) * (bad - curable)
        self.good = (self.good + 1) * (1 - bad)
        grow = 1.0 + (self.good >= GROW_AFTER).float()
        self.good *= self.good < GROW_AFTER
        self.scale = (self.scale * (1 - lost / 2) * grow).clamp(1.0, LARGEST_SCALE)

    # -- what a checkpoint holds of it ----------------------------------------------------------

    def _with_locals(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        for (name, parameter), local in zip(self.named, self.locals, strict=True):
            yield name, parameter, local

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Give the optimizer's tensors by the names of the parameters, sharded as they are."""
        for name, parameter, local in self._with_locals():
            for key, value in self.optimizer.state.get(local, {}).items():
                if isinstance(value, Tensor):
                    whole = sharded_like(parameter, value) if local is not parameter else value
                    yield f"{name}.{key}", whole

    def prime(self, progress: Mapping[str, Any]) -> None:
        """Make the state that the saved optimizer had, so that a checkpoint can be read into it."""
        kind = type(self.optimizer).__name__
        if progress.get("class", kind) != kind:
            raise CheckFailed(
                "the checkpoint does not fit this model and optimizer: it was saved with"
                f" {progress['class']}, this is {kind}",
                "resume with the optimizer that it was saved with",
            )
        had = set(progress.get("stateful", [name for name, _ in self.named]))
        for name, parameter, local in self._with_locals():
            if name not in had:
                self.optimizer.state.pop(local, None)
            elif not self.optimizer.state.get(local):
                local.grad = torch.zeros_like(local if self.fused else parameter)
        groups = self.optimizer.param_groups
        base = [copy_of(group["lr"]) for group in groups]
        for group in groups:
            set_lr(group, copy_of(group["lr"]) * 0)
        self.optimizer.grad_scale = self.optimizer.found_inf = None  # type: ignore[attr-defined]
        unhooked = getattr(type(self.optimizer).step, "__wrapped__", type(self.optimizer).step)
        unhooked(self.optimizer)
        for group, lr in zip(groups, base, strict=True):
            set_lr(group, lr)
        self._forget()

    def progress(self) -> dict[str, Any]:
        """Give what is neither a parameter nor a tensor beside one, as JSON keeps it."""
        state = self.optimizer.state
        numbers = {
            name: {k: v for k, v in state.get(local, {}).items() if isinstance(v, (int, float))}
            for name, _, local in self._with_locals()
        }
        return {
            "class": type(self.optimizer).__name__,
            "stateful": [name for name, _, local in self._with_locals() if state.get(local)],
            "plain": {name: values for name, values in numbers.items() if values},
            "groups": settings_of(self.optimizer),
            "scale": self.scale.item() if self.scaling else None,
            "nominal": self.nominal,
            "good": self.good.item(),
            "bad": self.skipped.item(),
        }

    def restore(self, progress: Mapping[str, Any]) -> None:
        if not self.keeps_settings and "groups" in progress:
            self._restore_settings(progress["groups"])
        for name, _, local in self._with_locals():
            if numbers := progress.get("plain", {}).get(name):
                self.optimizer.state[local].update(numbers)
        if self.scaling and (progress["scale"] or 1.0) != 1.0:  # 1.0 was that of fp32
            self.scale.fill_(progress["scale"])
        self.nominal = self.nominal or progress.get("nominal")
        self.good.fill_(progress["good"])
        self.skipped.fill_(progress.get("bad", progress.get("skipped", 0)))

    def _restore_settings(self, saved: list[dict[str, Any]]) -> None:
        groups = self.optimizer.param_groups
        if len(groups) != len(saved):
            raise CheckFailed(
                f"the checkpoint's optimizer has {len(saved)} groups of parameters,"
                f" this one {len(groups)}"
            )
        for group, values in zip(groups, saved, strict=True):
            for key, value in values.items():
                if key == "lr":
                    set_lr(group, value)
                elif key not in HOW:
                    group[key] = tuple(value) if isinstance(value, list) else value


def squares_of(grads: list[Tensor]) -> Tensor:
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    values = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    return torch.stack(torch._foreach_norm(values)).double().square().sum()
