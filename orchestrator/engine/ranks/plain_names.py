"""The names that a model's tensors have in the code of the model.

torch.compile() of a model or of a part wraps it in a module, which adds a prefix to the names of
all parameters inside. Checkpoints have names without it, so they load with and without compiling.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

# The prefixes of torch's own wrappers.
WORDS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    for word in WORDS:
        name = name.replace(word, "")
    return name


def named_parameters(
    model: nn.Module, *, every: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter once, or with `every` under each of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=not every):
        yield plain_name(name), parameter


def named_buffers(model: nn.Module, *, every: bool = False) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in model.named_buffers(remove_duplicate=not every):
        yield plain_name(name), buffer


def is_traceable_wrapper_subclass(value: Any) -> bool:
    """Return True for a tensor that is made of other tensors (torch's __tensor_flatten__)."""
    return isinstance(value, Tensor) and hasattr(type(value), "__tensor_flatten__")


def state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the model's state dict with its own tensors, not detached ones."""
    return {plain_name(name): value for name, value in model.state_dict(keep_vars=True).items()}


def inner_module(model: nn.Module) -> nn.Module:
    """Return the module inside a result of torch.compile(), or the model itself."""
    compiled = getattr(model, "_orig_mod", None)
    return compiled if isinstance(compiled, nn.Module) else model
