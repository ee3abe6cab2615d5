"""Commands that are called as with --json."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.head.screen import output


@contextmanager
def json_wanted(wanted: bool = True) -> Iterator[None]:
    """Switch the commands' output to JSON inside the block."""
    before = output.asked["json"]
    output.asked["json"] = wanted
    try:
        yield
    finally:
        output.asked["json"] = before
