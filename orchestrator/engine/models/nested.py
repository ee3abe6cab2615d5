"""Maps every tensor of a batch or of a model's outputs, at any depth."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

Change = Callable[[Any], Any]


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def map_nested(data: Any, change: Change, whole: Callable[[Any], bool] = is_tensor) -> Any:
    """Return a copy of `data` in which `change` has replaced each value that `whole` accepts.

    Containers keep their class, also a user's own.
    """
    if whole(data):
        return change(data)
    if isinstance(data, Mapping):
        changed = {name: map_nested(value, change, whole) for name, value in data.items()}
        if type(data) is dict or not isinstance(data, MutableMapping):
            return changed
        # The mapping may have attributes besides its items.
        again = copy.copy(data)
        again.update(changed)
        return again
    if isinstance(data, (list, tuple)):
        values = [map_nested(value, change, whole) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        other: Any = copy.copy(data)
        for name in (field.name for field in dataclasses.fields(data) if hasattr(data, field.name)):
            object.__setattr__(other, name, map_nested(getattr(data, name), change, whole))
        return other
    return data
