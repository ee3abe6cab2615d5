"""Hold several models that are trained together, as one module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from orchestrator.common.errors import UsageError

TYPE = 'models={"G": generator, "D": discriminator}'


class Models(nn.ModuleDict):
    """Models by name. Each is spread over the ranks by itself, and a step gets all of them."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        raise UsageError("several models were called as one", "call one of them: models[NAME](...)")


def together(models: Mapping[str, nn.Module]) -> Models:
    if not isinstance(models, Mapping) or not models:
        raise UsageError(f"models= is a {type(models).__name__}, not models by name", f"say {TYPE}")
    for name in models:
        if not isinstance(name, str) or not name.isidentifier() or hasattr(nn.ModuleDict, name):
            raise UsageError(
                f"models= has the name {name!r}, which no part of a module may have",
                "take letters, digits and _, and no name of a method such as train",
            )
    if len({id(model) for model in models.values()}) < len(models):
        raise UsageError("models= has the same model twice", f"say {TYPE}")
    return Models(models)


def parts_of(model: nn.Module) -> list[nn.Module]:
    """List the models that are spread by themselves: of one alone, there are none inside."""
    return list(model.children()) if isinstance(model, Models) else []
