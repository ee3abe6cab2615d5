"""Write values as JSON that names its tensors, and read them again.

Nothing that is read can run code, but for the classes that the reader trusts: those of the packages
that it names, as far as they are imported.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import operator
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from orchestrator.common.errors import UsageError
from orchestrator.engine.saving.pieces import DTYPES

ORDERED: dict[str, type[dict[Any, Any]]] = {"dict": dict, "ordered": OrderedDict, "count": Counter}
LISTS: dict[str, type[Any]] = {
    "list": list, "tuple": tuple, "deque": deque, "set": set, "size": torch.Size,
}  # fmt: skip


def encoded(
    value: Any,
    tensors: dict[str, Tensor],
    path: str,
    *,
    sharded: bool = False,
    packages: Collection[str] = (),
) -> Any:
    """Write a value as JSON; its tensors go into `tensors`, and it names them.

    Tensors may be in shards where whoever keeps them knows what to do with those. Objects of
    classes of the packages are taken apart, as pickle does.
    """
    within = functools.partial(encoded, tensors=tensors, sharded=sharded, packages=packages)
    if is_of(type(value), packages) and (pieces := taken_apart(value)):
        return {pieces[0]: [within(piece, path=path) for piece in pieces[1:]]}
    if isinstance(value, Tensor):
        refuse_unknown(value, path, sharded=sharded)
        tensors[path] = value.detach()
        return {"tensor": path}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if type(value) is deque and value.maxlen is not None:
        return {"bounded": [value.maxlen, within(list(value), path=path)]}
    for name, kind in LISTS.items():
        if type(value) is kind:
            return {name: [within(v, path=f"{path}[{i}]") for i, v in enumerate(value)]}
    for name, codec in ORDERED.items():
        if type(value) is codec:
            refuse_keys(value, path)
            items = [
                [within(key, path=path), within(inner, path=f"{path}[{key!r}]")]
                for key, inner in value.items()
            ]
            return {name: items}
    if type(value).__module__ == "numpy" and hasattr(value, "__array__"):
        with contextlib.suppress(TypeError):  # of texts, dates, objects
            tensor = torch.from_numpy(value.reshape(-1).copy()).reshape(value.shape)
            form = "array" if hasattr(value, "__setitem__") else "scalar"
            return {form: within(tensor, path=path)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if isinstance(value, (int, float, str)):  # numpy's float64 is one
        return json.loads(json.dumps(value))
    raise UsageError(
        f"{path} is a {type(value).__name__}, which cannot be kept",
        "give tensors, arrays, numbers, texts, bytes, and lists, tuples and dicts of them",
    )


def refuse_keys(value: Mapping[Any, Any], path: str) -> None:
    if any(isinstance(key, Tensor) for key in value):
        raise UsageError(
            f"{path} is a {type(value).__name__} with tensors for keys, which cannot be kept",
            "have texts or numbers for keys, such as the names of parameters",
        )


def refuse_unknown(tensor: Tensor, path: str, *, sharded: bool) -> None:
    inner = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(inner)
    if not plain or (isinstance(tensor, DTensor) and not sharded):
        raise UsageError(
            f"{path} is a {type(inner if sharded else tensor).__name__} ({tensor.layout}), which"
            " cannot be kept",
            "give this rank's part of it: value.to_local(), or value.to_dense()",
        )


def decoded(value: Any, tensors: Mapping[str, Tensor], packages: Collection[str] = ()) -> Any:
    """Read such JSON again."""
    if not isinstance(value, dict):
        return value
    within = functools.partial(decoded, tensors=tensors, packages=packages)
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return within(content).numpy()
    if kind == "scalar":
        return within(content).numpy()[()]
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "dtype":
        return DTYPES[content]
    if kind in ("object", "wrapper"):
        module, name, *pieces = map(within, content)
        made_of = trusted(module, name, packages)
        return (put_together if kind == "object" else wrapped)(made_of, *pieces)
    if kind == "bounded":
        most, items = content
        return deque(within(items), most)
    if kind in LISTS:
        return LISTS[kind](map(within, content))
    items = ((within(key), within(inner)) for key, inner in content)
    return ORDERED[kind](dict(items)) if kind == "count" else ORDERED[kind](items)


# -- objects ---------------------------------------------------------------------------------------


def packages_of(value: Any) -> frozenset[str]:
    """Name the packages that an object's classes are of, as far as they are a program's own."""
    modules = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    return frozenset(modules - {"builtins", "torch"})


def is_of(kind: type, packages: Collection[str]) -> bool:
    return kind.__module__.partition(".")[0] in packages


def taken_apart(value: Any) -> tuple[Any, ...] | None:
    """Give an object's class by its name, what it is made with, and its state; of a tensor, the
    tensors that it is made of, as torch.compile takes it apart."""
    name = type(value).__module__, type(value).__qualname__
    if is_traceable_wrapper_subclass(value):
        names, more = value.__tensor_flatten__()
        inner = {each: getattr(value, each) for each in names}
        return "wrapper", *name, inner, more, tuple(value.shape), value.stride()
    make, arguments, state, *items = (*value.__reduce_ex__(2), None)[:5]
    if make.__name__ != "__newobj__" or any(item is not None for item in items):
        return None
    return "object", *name, arguments[1:], state


def trusted(module: str, name: str, packages: Collection[str]) -> type[Any]:
    kind = operator.attrgetter(name)(sys.modules.get(module))
    if not isinstance(kind, type) or not is_of(kind, packages):
        raise ValueError(f"{module}.{name} is not a class of this program")
    return kind


def put_together(kind: type[Any], arguments: Any, state: Any) -> Any:
    made = kind.__new__(kind, *arguments)
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return made
    for attributes in state if isinstance(state, tuple) else (state,):
        for key, inner in (attributes or {}).items():
            object.__setattr__(made, key, inner)
    return made


def wrapped(kind: type[Any], inner: dict[str, Tensor], more: Any, shape: Any, strides: Any) -> Any:
    return kind.__tensor_unflatten__(inner, more, shape, strides)
