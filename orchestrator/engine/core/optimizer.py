"""The optimizer, and the parameters and settings that it works on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer

from orchestrator.common.errors import UsageError
from orchestrator.config.schema import Config
from orchestrator.engine.models.import_by_name import kind
from orchestrator.engine.sharding.mesh import Mesh, local_tensor

Factory = Callable[[list[nn.Parameter]], Optimizer]

FUSED = (AdamW, Adam, SGD)  # elementwise, with kernels that take a scale and may do nothing
HOW = ("fused", "foreach", "capturable", "differentiable")  # how it is computed, not what


def configured(config: Config) -> Factory:
    """Make the optimizer of optimizer.*: a function of the parameters."""
    wanted = config.optimizer

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        # A norm's scale or a bias has no reason to be small.
        decays = [p for p in parameters if p.dim() >= 2]
        others = [p for p in parameters if p.dim() < 2]
        groups = [
            {"params": decays, "weight_decay": wanted.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if wanted.name == "adamw":
            return AdamW(groups, lr=wanted.lr, betas=wanted.betas, eps=wanted.eps)
        return SGD(groups, lr=wanted.lr, momentum=wanted.momentum)

    return make


def bound(
    optimizer: Optimizer | Factory, names: Mapping[int, str], now: Mapping[str, nn.Parameter]
) -> Optimizer:
    """Move an optimizer from the parameters that it was made for to those of the spread model."""
    if not isinstance(optimizer, Optimizer):
        if not callable(optimizer):
            raise UsageError(
                f"optimizer is {kind(optimizer)}, and a Trainer has one optimizer of torch's",
                "one may treat parts of a model differently:"
                ' torch.optim.AdamW([{"params": a, "lr": 1e-3}, {"params": b, "lr": 1e-5}])',
            )
        wanted = [parameter for parameter in now.values() if parameter.requires_grad]
        result = optimizer(wanted)
        if not isinstance(result, Optimizer):
            raise UsageError(
                f"optimizer gave a {type(result).__name__}, not a torch optimizer",
                "give torch.optim.AdamW(model.parameters()), or a function of the parameters",
            )
        optimizer = result
        own = {id(parameter) for parameter in wanted}
        for group in optimizer.param_groups:
            refuse_strangers([p for p in group["params"] if id(p) not in own])
    else:
        for group in optimizer.param_groups:
            refuse_strangers([p for p in group["params"] if id(p) not in names])
            move(optimizer, group, names, now)
    if isinstance(optimizer, LBFGS):
        raise UsageError(
            "LBFGS evaluates the loss several times per step, which the Trainer does not",
            "use another optimizer",
        )
    return optimizer


def is_summed(parameter: nn.Parameter, mesh: Mesh) -> bool:
    """Tell whether torch sums this parameter's gradients over the ranks, if there are several."""
    if mesh.mesh is not None:
        return isinstance(parameter, DTensor)
    return mesh.strategy == "single" or parameter.requires_grad


def refuse_strangers(strangers: list[nn.Parameter]) -> None:
    if strangers:
        raise UsageError(
            f"the optimizer holds a parameter of shape {tuple(strangers[0].shape)} that is"
            " not the model's",
            "make it from the parameters of the very model that you give to the Trainer",
        )


def move(
    optimizer: Optimizer,
    group: dict[str, Any],
    names: Mapping[int, str],
    now: Mapping[str, nn.Parameter],
) -> None:
    for index, old in enumerate(group["params"]):
        new = group["params"][index] = now[names[id(old)]]
        if state := optimizer.state.pop(old, None):
            optimizer.state[new] = {key: placed(value, old, new) for key, value in state.items()}


def placed(value: Any, old: Tensor, new: Tensor) -> Any:
    """Spread state that is as large as its parameter in the way the parameter is."""
    if not isinstance(value, Tensor) or value.shape != old.shape or not value.dim():
        return value
    if isinstance(new, DTensor):
        return distribute_tensor(value.to(new.device), new.device_mesh, new.placements)
    return value.to(new.device)


def can_fuse(optimizer: Optimizer) -> bool:
    """Tell whether torch has fused kernels for it, and the user has not chosen another way."""
    if type(optimizer) not in FUSED:
        return False
    for group in optimizer.param_groups:
        if group.get("fused") is False or any(group.get(how) for how in HOW[1:]):
            return False
        if not all(has_kernel(parameter) for parameter in group["params"]):
            return False
    return True


def has_kernel(parameter: Tensor) -> bool:
    """Tell whether a fused kernel does for it what the optimizer says.

    On processors SGD's leaves bf16 and fp16 as they are, and Adam's makes infinities of fp16.
    """
    on = parameter.device.type
    return parameter.is_floating_point() and (
        on == "cuda" or (on == "cpu" and parameter.dtype in (torch.float32, torch.float64))
    )


def local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(local_tensor(parameter), requires_grad=parameter.requires_grad)


def local_state(value: Any, part: Tensor) -> Any:
    """Bring a value to this rank's part; a count of steps, too, which the fused kernels read."""
    if not isinstance(value, Tensor):
        return value
    value = local_tensor(value)
    return value.to(part.device, torch.float32) if not value.dim() else value


def copy_of(lr: Any) -> Any:
    return lr.clone() if isinstance(lr, Tensor) else lr


def set_lr(group: dict[str, Any], value: Any) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(value)
    else:
        group["lr"] = value


def as_number(item: tuple[str, Any]) -> tuple[str, Any]:
    key, value = item
    return key, value.item() if isinstance(value, Tensor) and not value.dim() else value


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Give what a user can set of each group of parameters, as JSON keeps it."""
    return [
        {key: v for key, v in map(as_number, group.items()) if is_plain(v)}
        for group in optimizer.param_groups
    ]


def is_plain(value: Any) -> bool:
    """Tell whether JSON keeps it as it is."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(inner) for key, inner in value.items())
    return value is None or isinstance(value, (bool, int, float, str))
