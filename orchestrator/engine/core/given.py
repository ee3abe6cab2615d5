"""Compares the settings that a program gives its optimizer and scheduler with a checkpoint's.

A resume takes the saved ones, as torch's load_state_dict does, so a learning rate that was changed
in the program has no effect: the user has to be told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.engine.core.optimizer import HOW

SHOWN = (bool, int, float, str)


def not_taken(saved: Mapping[str, Any] | None, own: Mapping[str, Any]) -> str:
    """Name the settings that the program has changed since the checkpoint's training began."""
    if not saved:  # of an earlier version
        return ""
    groups = list(zip(saved.get("optimizer") or [], own["optimizer"], strict=False))
    changes = list(dict.fromkeys(text for pair in groups for text in changed(*pair)))
    changes += changed(saved.get("scheduler") or {}, own["scheduler"] or {})
    return ", ".join(changes)


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for key, value in now.items():
        if key in HOW or key.startswith("_") or key not in before or same(before[key], value):
            continue
        shown = isinstance(value, SHOWN) and isinstance(before[key], SHOWN)
        yield f"{key} {number(before[key])}, not {number(value)}" if shown else key


def same(before: Any, now: Any) -> bool:
    """Compare, where one side went through JSON, which has no tuples."""
    if isinstance(now, (list, tuple)):
        own = isinstance(before, (list, tuple)) and len(before) == len(now)
        return own and all(same(*pair) for pair in zip(before, now, strict=True))
    return bool(before == now)


def number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
