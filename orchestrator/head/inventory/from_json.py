"""Build frozen dataclasses from the JSON that our own program sent."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def typed(kind: type[T], data: Any) -> T:
    """Turn lists into tuples and mappings into dataclasses, by the annotations of `kind`."""
    value: T = _value(kind, data)
    return value


def _value(kind: Any, data: Any) -> Any:
    if isinstance(kind, types.UnionType):  # X | None
        (kind,) = (inner for inner in typing.get_args(kind) if inner is not types.NoneType)
        return None if data is None else _value(kind, data)
    if dataclasses.is_dataclass(kind):
        hints = _hints(typing.cast(type, kind))
        values = {name: _value(hints[name], value) for name, value in data.items()}
        return typing.cast(Any, kind)(**values)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        many = inner[-1] is Ellipsis
        kinds = [inner[0]] * len(data) if many else inner
        return tuple(_value(inner, item) for inner, item in zip(kinds, data, strict=True))
    if origin is dict:
        return {key: _value(inner[1], value) for key, value in data.items()}
    return data
