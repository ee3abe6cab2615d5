"""The content of a checkpoint: the model's tensors by name, and plain values beside them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from orchestrator.common.errors import UsageError
from orchestrator.engine.ranks import plain_names
from orchestrator.engine.ranks.plain_names import is_traceable_wrapper_subclass
from orchestrator.engine.sharding.mesh import reshard_model

# The prefix of parameters and buffers in a checkpoint.
MODEL = "model."


def state_of(model: nn.Module, auxiliary: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all tensors to save by name: the model's own, not copies, and the auxiliary ones."""
    reshard_model(model)
    return {MODEL + name: tensor.detach() for name, tensor in saved_of(model)} | dict(auxiliary)


def saved_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters, and the buffers that are in the state dict."""
    yield from plain_names.named_parameters(model)
    kept = plain_names.state_dict(model).keys()
    yield from ((name, buffer) for name, buffer in plain_names.named_buffers(model) if name in kept)


# -- values as JSON with names of tensors, read without running code -------------------------------


def encode_state(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Return a value as JSON. Its tensors go into `tensors`, and the JSON has their names."""
    if isinstance(value, Tensor):
        refuse_unknown(value, path)
        tensors[path] = value.detach()
        return {"tensor": path}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode_state(v, tensors, f"{path}[{i}]") for i, v in enumerate(value)]}
    if isinstance(value, dict) and not any(isinstance(key, Tensor) for key in value):
        return {
            "dict": [
                [encode_state(key, tensors, path), encode_state(v, tensors, f"{path}[{key!r}]")]
                for key, v in value.items()
            ]
        }
    if isinstance(value, (int, float, str)):
        # numpy's float64 is a float as well.
        return json.loads(json.dumps(value))
    raise UsageError(
        f"{path} is a {type(value).__name__}, which cannot be kept",
        "give tensors (torch.from_numpy() makes one of an array), numbers, texts, bytes, and"
        " lists, tuples and dicts of them",
    )


def refuse_unknown(tensor: Tensor, path: str) -> None:
    inner = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(inner):
        raise UsageError(
            f"{path} is a {type(inner).__name__} ({tensor.layout}), which cannot be kept",
            "give a plain tensor: value.to_dense()",
        )


def decode_state(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that encode_state() turned into JSON."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "dict":
        return {decode_state(key, tensors): decode_state(inner, tensors) for key, inner in content}
    return {"list": list, "tuple": tuple}[kind](decode_state(inner, tensors) for inner in content)
