"""Tell what kind of program a name is in a directory, on the head and on the nodes.

Shipped to the nodes: the standard library alone, and Python 3.9.
"""

from __future__ import annotations

import os
import shutil


def program_at(name: str, workdir: str) -> tuple[str, str]:
    """Return "script" (Python) or "program" and how it is started, or why not and its path."""
    path = os.path.join(workdir, name)
    if os.path.isdir(path) and os.path.isfile(os.path.join(path, "__main__.py")):
        return "script", name
    if os.path.isdir(path):
        return "a directory", path
    if not os.path.isfile(path):
        if "/" not in name and shutil.which(name):
            return "program", name
        return "missing", path
    if not os.access(path, os.R_OK):
        return "unreadable", path
    with open(path, "rb") as file:
        first = file.readline(256)
    foreign = first.startswith(b"\x7fELF") or (first.startswith(b"#!") and b"python" not in first)
    if name.endswith(".py") or not foreign:
        return "script", name
    if not os.access(path, os.X_OK):
        return "not executable", path
    return "program", name if "/" in name else "./" + name
