"""The names that a model's tensors have in the code of the model.

torch.compile(model), or of a part of it, puts a module around it, and a word into the names of all
parameters inside. What is saved has the names without: they are read again with and without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

WORDS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch's own modules around others


def plain(name: str) -> str:
    for word in WORDS:
        name = name.replace(word, "")
    return name


def parameters(model: nn.Module, *, every: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter once, or with `every` under each of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=not every):
        yield plain(name), parameter


def buffers(model: nn.Module, *, every: bool = False) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in model.named_buffers(remove_duplicate=not every):
        yield plain(name), buffer


def is_traceable_wrapper_subclass(value: Any) -> bool:
    """Return True for a tensor that is made of others, by torch's protocol for such classes."""
    return isinstance(value, Tensor) and hasattr(type(value), "__tensor_flatten__")


def state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the model's state dict, with the very tensors that train."""
    return {plain(name): value for name, value in model.state_dict(keep_vars=True).items()}


def inner(model: nn.Module) -> nn.Module:
    """Return the module that torch.compile(model) was given."""
    compiled = getattr(model, "_orig_mod", None)
    return compiled if isinstance(compiled, nn.Module) else model
