"""Finds the lines of the user's source around the one that failed. Loaded by a rank that fails.

It shares a process with the user's code, so at run time it imports nothing of ours.
"""

from __future__ import annotations

import linecache
import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.protocol.reports import SourceRecord

LARGEST_FILE = 4 << 20
LONGEST_LINE = 2000


def around(error: BaseException, frame: Any, began: float) -> SourceRecord | None:
    """Return three lines of the file of a frame, or of the text that is no Python.

    Nothing where the file has changed since the program began: these are not the lines that ran.
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
    if not line or not is_as_it_ran(file, began):
        return None
    first = max(1, line - 1)
    lines = [text.rstrip("\r\n") for text in linecache.getlines(file)[first - 1 : line + 1]]
    if len(lines) <= line - first or max(map(len, lines)) > LONGEST_LINE:
        return None
    if not isinstance(error, SyntaxError):  # which counts characters, as frames do bytes
        code = lines[line - first].encode("utf-8", "replace")
        begin, end = (len(code[:at].decode("utf-8", "replace")) for at in (begin, end))
    begin, end = max(0, begin), max(0, end)
    return {"first": first, "lines": lines, "line": line, "begin": begin, "end": end}


def is_as_it_ran(file: str, began: float) -> bool:
    try:
        state = os.stat(file)
    except (OSError, ValueError):
        return False
    usual = stat.S_ISREG(state.st_mode) and state.st_size < LARGEST_FILE
    return usual and state.st_mtime <= began


def hidden(source: SourceRecord | None, hide: Callable[[str], str]) -> SourceRecord | None:
    """Return the lines without secrets; the caret stays where there was none in its line."""
    if source is None:
        return None
    lines = [hide(text) for text in source["lines"]]
    if lines == source["lines"]:
        return source
    return {**source, "lines": lines, "begin": 0, "end": 0}
