"""Bind optimizers to the sharded parameters, choose their kernels, set learning rates."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
)

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.config.parse import check_one_of
from orchestrator.config.schema import Config, SchedulerConfig
from orchestrator.engine.models.import_by_name import kind_of
from orchestrator.engine.models.nested import map_nested
from orchestrator.engine.ranks import plain_names
from orchestrator.engine.sharding.blocks import blocks_of, hidden_matrices
from orchestrator.engine.sharding.mesh import Mesh


class Together(Optimizer):
    """Several optimizers that step one after the other. Each keeps its own state and groups."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            part.register_load_state_dict_post_hook(self.show)
        self.show()

    def show(self, *_: Any) -> None:
        """Show the parts' present state and groups to schedulers and to torch's own calls."""
        shown = {key: kept for part in self.parts for key, kept in part.state.items()}
        self.state = defaultdict(dict, shown)
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            step_optimizer(part)
        self.show()

    def state_dict(self) -> dict[str, Any]:
        """Return the parts' state dicts as one, with parameters numbered through all parts."""
        joined: dict[str, Any] = {"state": {}, "param_groups": [], "parts": []}
        numbers = itertools.count()
        for part in self.parts:
            own, numbered = part.state_dict(), [next(numbers) for _ in parameters_of(part)]
            rest = dict(own.get("state", {}))
            joined["state"] |= {new: rest.pop(n) for n, new in enumerate(numbered) if n in rest}
            joined["param_groups"] += [
                {**group, "params": [numbered[n] for n in group["params"]]}
                for group in own.get("param_groups", [])
            ]
            # What belongs to no parameter stays apart, because two parts may use the same keys.
            apart = {"state": rest, "param_groups": []}
            joined["parts"].append({key: apart.get(key, value) for key, value in own.items()})
        return joined

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        # torch's own calls leave out what belongs to no parameter.
        joined = {**self.state_dict(), **state_dict}
        groups, state = iter(joined["param_groups"]), joined["state"]
        for part, own in zip(self.parts, joined["parts"], strict=True):
            mine = [next(groups) for _ in part.param_groups if "param_groups" in own]
            known = {n: state[n] for group in mine for n in group["params"] if n in state}
            read = {"state": {**own.get("state", {}), **known}, "param_groups": mine}
            part.load_state_dict({key: read.get(key, value) for key, value in own.items()})


def one_of_several(optimizer: Any) -> Optimizer:
    """Return a list of optimizers as one that steps all of them; an optimizer unchanged."""
    if isinstance(optimizer, (list, tuple)):
        names = "+".join(type(part).__name__ for part in optimizer)
        optimizer = type(names, (Together,), {"__module__": __name__})(optimizer)
    return cast(Optimizer, optimizer)


def parts_of(optimizer: Any) -> list[Any]:
    """Return the optimizers in a list or a Together, or a list of only the optimizer itself."""
    several = optimizer.parts if isinstance(optimizer, Together) else optimizer
    return [*several] if isinstance(several, (list, tuple)) else [optimizer]


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def step_optimizer(optimizer: Optimizer) -> None:
    """Call step() of an optimizer; Muon gets whole matrices where they are sharded."""
    if is_muon(optimizer) and any(isinstance(p, DTensor) for p in parameters_of(optimizer)):
        step_on_shards(optimizer)
    else:
        optimizer.step()


# The number of matrices that are gathered at a time.
AT_ONCE = 8


def is_muon(optimizer: Optimizer) -> bool:
    # torch 2.8 has no Muon.
    return type(optimizer) is getattr(torch.optim, "Muon", None)


@torch.no_grad()
def step_on_shards(optimizer: Optimizer) -> None:
    """Step a few matrices at a time, with their gradients and momentum gathered."""
    every = [p for p in parameters_of(optimizer) if p.grad is not None]
    gradients = {parameter: parameter.grad for parameter in every}
    for parameter in every:
        parameter.grad = None
    for first in range(0, len(every), AT_ONCE):
        some = every[first : first + AT_ONCE]
        for parameter in some:
            state = optimizer.state[parameter]
            parameter.grad = redistribute_tensor(gradients[parameter])
            state.update({name: redistribute_tensor(value) for name, value in state.items()})
        optimizer.step()
        for parameter in some:
            state = optimizer.state[parameter]
            parameter.grad = None
            state.update(
                {name: redistribute_tensor(value, parameter) for name, value in state.items()}
            )


def redistribute_tensor(tensor: Any, like: Any = None) -> Any:
    """Return a DTensor sharded like another, or whole on each rank if there is no other.

    Anything that is not a DTensor is returned unchanged.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    whole = [Replicate()] * tensor.device_mesh.ndim
    return tensor.redistribute(placements=whole if like is None else like.placements)


# It returns an optimizer, or a list of several.
Factory = Callable[[list[nn.Parameter]], Any]

# Settings that choose how a step is computed, not its result.
HOW = ("fused", "foreach", "capturable", "differentiable")
# The fused kernels of these skip a step if found_inf is set.
FUSED = (AdamW, Adam)
# These update each element by itself, by operations that DTensor supports.
ELEMENTWISE = (*FUSED, SGD, RAdam, NAdam, Adamax, Adagrad, Adadelta, RMSprop, ASGD)


def optimizer_factory(config: Config, model: nn.Module) -> Factory:
    """Return a function that makes the optimizer of the config's optimizer.* from parameters.

    Call it before the model is sharded.
    """
    wanted, momentum = config.optimizer, config.optimizer.momentum
    hidden = hidden_of(model, config) if wanted.name == "muon" else set()

    def make(parameters: list[nn.Parameter]) -> Any:
        names = {id(parameter): name for name, parameter in plain_names.named_parameters(model)}
        matrices = [p for p in parameters if names[id(p)] in hidden]
        rest = [p for p in parameters if names[id(p)] not in hidden]
        # Weight decay would shrink norms' scales and biases for no benefit.
        groups = [
            {"params": [p for p in rest if p.dim() >= 2], "weight_decay": wanted.weight_decay},
            {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if wanted.name == "sgd":
            return SGD(groups, lr=wanted.lr, momentum=0.9 if momentum is None else momentum)
        adamw = functools.partial(AdamW, lr=wanted.lr, betas=wanted.betas, eps=wanted.eps)
        if not matrices:
            return adamw(groups)
        of_matrices = torch.optim.Muon(
            matrices,
            lr=wanted.lr if wanted.muon_lr is None else wanted.muon_lr,
            weight_decay=wanted.weight_decay,
            momentum=0.95 if momentum is None else momentum,
            adjust_lr_fn=wanted.adjust_lr,
        )
        return [of_matrices, adamw(groups)] if groups else of_matrices

    return make


def hidden_of(model: nn.Module, config: Config) -> set[str]:
    """Return the names of the matrices that Muon trains; refuse a model without any."""
    if not hasattr(torch.optim, "Muon"):
        raise CheckFailed(
            f"optimizer.name: muon needs torch 2.9 or later, and this is {torch.__version__}"
        )
    found = hidden_matrices(model, blocks_of(model, config.fsdp.wrap))
    if not found:
        raise UsageError(
            "optimizer.name is muon, which is for matrices inside repeated blocks, and the model"
            " has none",
            "name the classes of its blocks: fsdp.wrap; or optimizer.name: adamw",
        )
    return found


def rebind_optimizer(
    optimizer: Any,
    names: Mapping[int, str],
    now: Mapping[str, nn.Parameter],
    name: str,
) -> Optimizer:
    """Rebind an optimizer from the parameters that it was made with to those of the sharded model.

    It may be a list of several. If it is a function, call it with the trained parameters, or only
    those of the model `name`.
    """
    if callable(optimizer):
        prefix = f"{name}." if name else ""
        wanted = [p for key, p in now.items() if p.requires_grad and key.startswith(prefix)]
        optimizer, names = optimizer(wanted), {id(p): key for key, p in now.items()}
    for part in parts_of(optimizer):
        if not isinstance(part, Optimizer):
            raise UsageError(
                f"optimizer is {kind_of(part)}, not an optimizer of torch's",
                "give torch.optim.AdamW(model.parameters()), or a function of the parameters",
            )
        for group in part.param_groups:
            move_group(part, group, names, now)
        refuse_other_calls(part)
    return one_of_several(optimizer)


def is_summed(parameter: nn.Parameter, mesh: Mesh) -> bool:
    """Return True if torch sums this parameter's gradients over the ranks, or there is only one."""
    if mesh.mesh is not None:
        return isinstance(parameter, DTensor)
    return mesh.strategy == "single" or parameter.requires_grad


def refuse_other_calls(optimizer: Optimizer) -> None:
    """Refuse LBFGS, SAM and schedule-free optimizers, which need more calls than step()."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UsageError(
            f"{type(optimizer).__name__} evaluates the loss several times per step, which the"
            " Trainer does not",
            "use another optimizer",
        )
    if callable(getattr(optimizer, "eval", None)):
        raise UsageError(
            f"{type(optimizer).__name__} has train() and eval(), by which it shows other weights"
            " for evaluation, and the Trainer calls neither",
            "use ema=, which evaluates and saves an average, with another optimizer",
        )


def refuse_not_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer that may need whole tensors, because a rank holds only shards."""
    if not is_muon(optimizer) and type(optimizer) not in ELEMENTWISE:
        raise UsageError(
            f"{type(optimizer).__name__} may need whole tensors, and the parameters are in shards",
            'strategy="ddp" (fsdp.sharding_strategy), or elementwise=True if it updates each'
            " element by itself",
        )
    for parameter in parameters_of(optimizer) if is_muon(optimizer) else ():
        if isinstance(parameter, DTensor):
            ranks = parameter.device_mesh.size(parameter.device_mesh.ndim - 1)
            if len(parameter) < ranks:
                raise UsageError(
                    f"Muon has a matrix of shape {tuple(parameter.shape)}, with fewer rows than the"
                    f" {ranks} ranks that share it",
                    "leave it to another optimizer: [Muon(matrices), AdamW(others)];"
                    ' or strategy="ddp" (fsdp.sharding_strategy)',
                )


def move_group(
    optimizer: Optimizer,
    group: dict[str, Any],
    names: Mapping[int, str],
    now: Mapping[str, nn.Parameter],
) -> None:
    for index, old in enumerate(group["params"]):
        if id(old) not in names:
            raise UsageError(
                f"the optimizer holds a parameter of shape {tuple(old.shape)} that is not the"
                " model's",
                "make it from the parameters of the very model that you give to the Trainer",
            )
        new = group["params"][index] = now[names[id(old)]]
        if old is not new and (state := optimizer.state.pop(old, None)):
            optimizer.state[new] = map_nested(state, functools.partial(place_state, old, new))


def place_state(old: Tensor, new: Tensor, value: Any) -> Any:
    """Shard or move a state tensor like its parameter, if both have the same shape."""
    if not isinstance(value, Tensor) or value.shape != old.shape or not value.dim():
        return value
    if isinstance(new, DTensor):
        return distribute_tensor(value.to(new.device), new.device_mesh, new.placements)
    return value.to(new.device)


@contextlib.contextmanager
def lr_multiplied(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply the learning rates within the block, and restore them for the user's scheduler."""
    groups = optimizer.param_groups if factor != 1.0 else []
    before = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = group["lr"] * factor
    yield
    for group, lr in zip(groups, before, strict=True):
        group["lr"] = lr


def is_plain(value: Any) -> bool:
    """Return True if JSON can represent the value."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(inner) for key, inner in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


# -- fused kernels ---------------------------------------------------------------------------------


def fuse_kernels(optimizer: Optimizer) -> bool:
    """Switch to fused kernels, unless the user chose others; return True if they are used."""
    groups = optimizer.param_groups
    chosen = any(g.get("fused") is False or any(g.get(how) for how in HOW[1:]) for g in groups)
    # Fused kernels of torch refuse a mix of plain tensors and DTensors.
    mixed = any(len({isinstance(p, DTensor) for p in group["params"]}) > 1 for group in groups)
    if type(optimizer) not in FUSED or chosen or mixed:
        return False
    if not all(map(has_kernel, parameters_of(optimizer))):
        return False
    for group in groups:
        group["fused"] = True
    return True


def has_kernel(parameter: Tensor) -> bool:
    """Return True if a fused kernel supports the parameter; on CPUs Adam's overflows in fp16."""
    on = parameter.device.type
    return parameter.is_floating_point() and (
        on == "cuda" or (on == "cpu" and parameter.dtype in (torch.float32, torch.float64))
    )


def step_unless(optimizer: Any, bad: Tensor) -> None:
    """Call step() of a fused optimizer, which skips the step on the device if `bad` is 1.0.

    This is how torch.amp skips steps; the host does not wait.
    """
    optimizer.grad_scale, optimizer.found_inf = None, bad
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


# -- the learning rate -----------------------------------------------------------------------------


class LrScheduler:
    """Steps a torch scheduler, if there is one, after each step or epoch."""

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer, every: str) -> None:
        check_one_of("scheduler_every", every, ("step", "epoch"))
        makes_one = isinstance(scheduler, type) or not hasattr(scheduler, "state_dict")
        if scheduler is not None and makes_one:
            scheduler = scheduler(optimizer)
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise UsageError(
                "the scheduler belongs to another optimizer than the Trainer's",
                "give a function of the optimizer: scheduler=lambda all: StepLR(all, 30)",
            )
        # ReduceLROnPlateau needs the loss of an epoch.
        self.by_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self.scheduler, self.every = scheduler, "epoch" if self.by_metric else every

    def after_step(self) -> None:
        if self.scheduler is not None and self.every == "step":
            self.scheduler.step()

    def after_epoch(self, loss: float | None) -> None:
        """Step a scheduler per epoch; ReduceLROnPlateau only if there is a loss."""
        if self.scheduler is not None and self.every == "epoch":
            if not self.by_metric:
                self.scheduler.step()
            elif loss is not None:
                self.scheduler.step(loss)

    def state(self) -> dict[str, Any] | None:
        """Return the part of the scheduler's state that JSON can represent."""
        if self.scheduler is None:
            return None
        return {k: v for k, v in self.scheduler.state_dict().items() if is_plain(v)}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore a saved state; functions, which are not saved, stay as they are."""
        if self.scheduler is not None and state is not None:
            self.scheduler.load_state_dict({**self.scheduler.state_dict(), **state})


def learning_rate_factor(config: SchedulerConfig, step: int, max_steps: int) -> float:
    """Return the factor of the peak learning rate at a step, counted from 1."""
    total = config.total_steps or max_steps
    warmup = max(1, total // 20) if config.warmup_steps is None else config.warmup_steps
    if step <= warmup:
        return step / warmup
    if config.name == "constant":
        return 1.0
    decay = (config.decay_steps or max(1, total // 5)) if config.name == "wsd" else total
    start = max(warmup, total - decay)
    done = min(1.0, max(0.0, (step - start) / max(1, total - start)))
    low = config.min_lr_ratio
    if config.name == "cosine":
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))
    return 1.0 - (1 - low) * done
