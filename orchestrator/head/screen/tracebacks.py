"""Holds back the stacks that ranks end with, and shows paths as the user knows them.

One rank's failure is met by all others within a second, and each prints a traceback of its own:
those are held back until the cause is known. The logs keep every byte.
"""

from __future__ import annotations

import re
from dataclasses import replace

from orchestrator.common.program import tree_title
from orchestrator.records.outcome import JobVerdict

# How a stack begins that may be a program's last word; torch begins lines of a traceback so.
LAST_WORDS = re.compile(
    r"(\[rank\d+\]: ?)?(Traceback \(most recent call last\):| *\+ Exception Group Traceback"
    r"|Fatal Python error: )"
)
BEGINNINGS = (b"Traceback (most recent", b"Fatal Python error", b"Group Traceback", b"[rank")
HELD_SECONDS = 10.0  # a process that failed has ended by then, and its node has said so
BURST_SECONDS = 0.3  # within which one stack is printed
TALK_SECONDS = 1.0  # who goes on talking for so long has only told of an exception
MOST_HELD = 5000  # lines of one rank


class HeldStack:
    """Holds back the stack that a stream ends with, for as long as it may be its last word."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.until = self.last = 0.0

    def concerns(self, data: bytes) -> bool:
        """Tell whether these bytes need shown(): nearly all do not."""
        return bool(self.lines) or any(each in data for each in BEGINNINGS)

    def shown(self, lines: list[str], now: float) -> list[str]:
        """Return the lines that are to be shown now."""
        begin = 0
        if not self.lines:
            begins = (number for number, line in enumerate(lines) if LAST_WORDS.match(line))
            begin = next(begins, len(lines))
            self.until = now + HELD_SECONDS
        elif lines and now > self.last + BURST_SECONDS:
            self.until = min(self.until, now + TALK_SECONDS)
        self.last = now
        self.lines += lines[begin:]
        return lines[:begin] + (self.rest() if len(self.lines) > MOST_HELD else [])

    def due(self, now: float) -> list[str]:
        """Return what has been held back for long enough."""
        return self.rest() if self.lines and now > self.until else []

    def rest(self) -> list[str]:
        held, self.lines = self.lines, []
        return held


# -- own paths ----------------------------------------------------------------------------------
# Shows files of a snapshot by the paths that the user knows: those of the working tree. Pure.

SNAPSHOT = r"(?<![^\s\"'(:=,])/[^\s\"':]*?/code/snapshots/[0-9a-f]{8}-[0-9]{1,6}/"  # on a node


def in_text(text: str, tree: str) -> str:
    """Replace each path of a snapshot of this directory by that of the directory itself."""
    if not tree or "/code/snapshots/" not in text:
        return text
    title = re.escape(tree_title(tree))
    return re.sub(f"{SNAPSHOT}{title}(?![^/\\s\"':,;)])", lambda _: tree.rstrip("/"), text)


def in_verdict(verdict: JobVerdict, tree: str) -> JobVerdict:
    """Return the verdict as it is shown; the record keeps what the nodes said."""
    return replace(
        verdict,
        message=in_text(verdict.message, tree),
        traceback=in_text(verdict.traceback, tree),
        where=in_text(verdict.where, tree),
    )
