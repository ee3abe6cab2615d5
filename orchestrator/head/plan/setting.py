"""One environment variable of a node's ranks, and why it has its value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    name: str
    value: str
    why: str
    yours: bool = False  # not computed: somebody set it
