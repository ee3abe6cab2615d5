"""Shows files of a snapshot by the paths that the user knows: those of the working tree. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

SNAPSHOT = r"(?<![^\s\"'(:=,])/[^\s\"':]*?/code/snapshots/[0-9a-f]{8}-[0-9]{1,6}/"  # on a node
SHOWN = ("message", "traceback", "where")


def in_text(text: str, tree: str) -> str:
    """Replace each path of a snapshot of this directory by that of the directory itself."""
    if not tree or "/code/snapshots/" not in text:
        return text
    title = re.escape(PurePosixPath(tree).name or "root")
    return re.sub(f"{SNAPSHOT}{title}(?![^/\\s\"':,;)])", lambda _: tree.rstrip("/"), text)


def in_verdict(verdict: Mapping[str, Any], tree: str) -> dict[str, Any]:
    """Return the verdict as it is shown; the record keeps what the nodes said."""
    return {
        name: in_text(value, tree) if name in SHOWN and isinstance(value, str) else value
        for name, value in verdict.items()
    }
