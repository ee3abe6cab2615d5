"""Find a view when a command asks for it: what it needs may not be installed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from orchestrator.common.errors import UsageError
from orchestrator.common.program import how_to_add

OURS = "orchestrator"
VIEWS = ("jinja2", "starlette", "textual", "uvicorn")


def import_view(room: str) -> Any:
    """Return the command of a room of `orchestrator/views`."""
    with explain_missing_package(room):
        return importlib.import_module(f"{OURS}.views.{room}.command")


@contextlib.contextmanager
def explain_missing_package(room: str) -> Iterator[None]:
    """Raise a UsageError that names the missing package of a view and how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        # A missing module of our own is a defect, not a missing package.
        if missing == OURS:
            raise
        raise UsageError(
            f"`orchestrator {room}` needs {missing}, which is not installed here",
            how_to_add(*VIEWS),
        ) from None
