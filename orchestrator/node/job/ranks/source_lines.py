"""Finds the lines of the user's source around the one that failed. Loaded by a rank that fails.

It shares a process with the user's code, so at run time it imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.protocol.reports import SourceRecord

LARGEST_FILE = 4 << 20
LONGEST_LINE = 2000


def around(
    error: BaseException, frame: Any, began: float, hide: Callable[[str], str]
) -> SourceRecord | None:
    """Return three lines of the file of a frame, or of the text that is no Python.

    Nothing where the file has changed since the program began: these are not the lines that ran.
    The caret is left out where the lines hold a secret.
    """
    if isinstance(error, SyntaxError):
        file, line = error.filename or "", error.lineno or 0
        begin, end = (error.offset or 0) - 1, (getattr(error, "end_offset", None) or 0) - 1
    elif frame is None:
        return None
    else:
        file, line = frame.filename, frame.lineno or 0
        begin, end = getattr(frame, "colno", None) or 0, getattr(frame, "end_colno", None) or 0
        if getattr(frame, "end_lineno", line) != line:
            end = 1 << 20
    first = max(1, line - 1)
    found = linecache.getlines(file)[first - 1 : line + 1] if is_as_it_ran(file, began) else []
    lines = [hide(text.rstrip("\r\n")) for text in found]
    if not line or len(lines) <= line - first or max(map(len, lines)) > LONGEST_LINE:
        return None
    if not isinstance(error, SyntaxError):  # which counts characters, as frames do bytes
        code = found[line - first].encode("utf-8", "replace")
        begin, end = (len(code[:at].decode("utf-8", "replace")) for at in (begin, end))
    if lines != [text.rstrip("\r\n") for text in found]:
        begin = end = 0
    return {
        "first": first,
        "lines": lines,
        "line": line,
        "begin": max(0, begin),
        "end": max(0, end),
    }


def is_as_it_ran(file: str, began: float) -> bool:
    with contextlib.suppress(OSError, ValueError):
        state = os.stat(file)
        usual = stat.S_ISREG(state.st_mode) and state.st_size < LARGEST_FILE
        return usual and state.st_mtime <= began
    return False
