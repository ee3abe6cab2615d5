"""Finds a view when a command asks for it: what it needs may not be installed."""

from __future__ import annotations

import importlib
from typing import Any

from orchestrator.common.errors import UsageError

VIEWS = "pip install textual starlette uvicorn"  # what the extra [views] installs


def view(room: str) -> Any:
    """Return the command of a room of `orchestrator/views`."""
    try:
        return importlib.import_module(f"orchestrator.views.{room}.command")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        raise UsageError(
            f"`orchestrator {room}` needs {missing}, which is not installed here", VIEWS
        ) from None
