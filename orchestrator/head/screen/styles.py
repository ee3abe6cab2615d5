"""Defines the meaning of colours on every screen, and decides if colours are shown."""

from __future__ import annotations

import os
import sys
from typing import TextIO

# The styles in the syntax of Rich.
FAILED, WARNING, DONE, UNKNOWN = "bold red", "yellow", "green", "cyan"
DIM, STRONG = "dim", "bold"
CODES = {FAILED: "1;31", WARNING: "33", DONE: "32", UNKNOWN: "36", DIM: "2", STRONG: "1"}
# Colours that tell the lines of different nodes apart.
OF_NODES = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
# The styles of states of jobs, nodes and ranks.
STATES = {
    **dict.fromkeys(("running", "done", "open"), DONE),
    **dict.fromkeys(("failed", "lost", "unreachable", "unknown there"), FAILED),
    **dict.fromkeys(("stopped", "starting", "queued", "restarting"), WARNING),
}

_chosen: list[bool | None] = [None]


def choose_colors(color: bool | None) -> None:
    """Set --color or --no-color; with None, the environment and the terminal decide."""
    _chosen[0] = color


def colors_shown(out: TextIO | None = None) -> bool:
    """Return True if standard output, or `out`, gets colours.

    --color decides, then NO_COLOR, FORCE_COLOR, CLICOLOR_FORCE and CLICOLOR as in other programs,
    then whether it is a terminal.
    """
    if _chosen[0] is not None:
        return _chosen[0]
    if os.environ.get("NO_COLOR"):
        return False
    if any(
        os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")
    ):
        return True
    out = out or sys.stdout
    calm = os.environ.get("TERM") == "dumb" or os.environ.get("CLICOLOR") == "0"
    return out is not None and out.isatty() and not calm


def style_text(text: str, style: str) -> str:
    """Return a text with the codes of a style; printing removes them if colours are off."""
    return f"\x1b[{CODES[style]}m{text}\x1b[0m" if style and text else text
