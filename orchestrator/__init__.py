"""Train PyTorch models on machines that you reach only by SSH."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.engine.trainer import Trainer

__all__ = ["Trainer"]
__version__ = "0.1.0"

# Imported when somebody asks for it: the head must not load torch.
LATER = {"Trainer": "orchestrator.engine.trainer"}


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(LATER[name]), name)
