"""What a checkpoint holds: the model's tensors by name, and what is beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from orchestrator.common.errors import UsageError
from orchestrator.engine.ranks import plain_names
from orchestrator.engine.sharding.mesh import plain_of
from orchestrator.engine.sharding.own_code import WHOLE
from orchestrator.engine.sharding.used_parts import shards_again

MODEL = "model."  # before the names of parameters and buffers in a checkpoint


def state_of(model: nn.Module, auxiliary: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all that is saved, by name: the very tensors that train, and what is beside them."""
    shards_again(model)
    state: dict[str, Tensor] = {}
    for name, tensor in saved_of(model):
        state.update(made_of(MODEL + name, tensor))
    return state | dict(auxiliary)


def saved_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters, and the buffers that are to be kept."""
    yield from plain_names.parameters(model)
    kept = plain_names.state_dict(model).keys()
    yield from ((name, buffer) for name, buffer in plain_names.buffers(model) if name in kept)


def made_of(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor of the model, or those that it is made of."""
    plain = plain_of(tensor)
    if isinstance(plain, DTensor) and is_traceable_wrapper_subclass(plain.to_local()):
        raise UsageError(
            f"no checkpoint can hold {name.removeprefix(MODEL)}, a"
            f" {type(plain.to_local()).__name__} in shards",
            f"{WHOLE}; or train without save_to=, save_every= and --max-restarts",
        )
    for inner, value in plain_names.made_of(name, plain):
        yield inner, value.detach()


def frozen_of(model: nn.Module) -> set[str]:
    """Name what nothing trains: frozen weights, and buffers of integers, as quantised weights are.

    It may change all the same, and is saved as it is then.
    """
    return {
        inner
        for name, tensor in saved_of(model)
        if (
            not tensor.requires_grad
            if isinstance(tensor, nn.Parameter)
            else tensor.dim() and not (tensor.is_floating_point() or tensor.is_complex())
        )
        for inner, _ in made_of(MODEL + name, tensor)
    }


def take_shapes(model: nn.Module, saved: Mapping[str, object], device: torch.device) -> list[str]:
    """Give buffers the shapes that they were saved with: some grow, and some come to be in the
    first forward. Return the names of those that had another one."""
    stored = {
        name.removeprefix(MODEL): entry
        for name, entry in saved.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(MODEL)
    }
    changed = []
    for name, buffer in dict(saved_of(model)).items():
        entry = stored.pop(name, None)
        if entry is None or isinstance(buffer, nn.Parameter) or buffer.shape == entry.size:
            continue
        buffer.data = torch.zeros(entry.size, dtype=buffer.dtype, device=buffer.device)
        changed.append(MODEL + name)
    modules = {plain_names.plain(name): module for name, module in model.named_modules()}
    for name, entry in stored.items():
        prefix, _, leaf = name.rpartition(".")
        module = modules.get(prefix)
        empty = module is not None and leaf not in vars(module) and getattr(module, leaf, 0) is None
        with contextlib.suppress(TypeError):  # of a parameter that this model does without
            if empty:
                new = torch.zeros(entry.size, dtype=entry.properties.dtype, device=device)
                setattr(module, leaf, new)
    return changed
