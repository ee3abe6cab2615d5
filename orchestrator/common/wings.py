"""Find a view when a command asks for it: the core imports none, and starts faster."""

from __future__ import annotations

import importlib
from typing import Any


def import_view(room: str) -> Any:
    """Return the command of a room of `orchestrator/views`."""
    return importlib.import_module(f"orchestrator.views.{room}.command")
