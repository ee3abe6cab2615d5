"""Holds back the final tracebacks of ranks, and replaces snapshot paths by the user's paths.

After one rank fails, all others fail within a second, each with a traceback of its own. These are
held back until the cause is known. The logs keep every byte.
"""

from __future__ import annotations

import re
from dataclasses import replace

from orchestrator.common.program import tree_title
from orchestrator.records.outcome import JobVerdict

# The first line of a traceback that may end a program; torch adds the prefix "[rank0]: ".
LAST_WORDS = re.compile(
    r"(\[rank\d+\]: ?)?(Traceback \(most recent call last\):| *\+ Exception Group Traceback"
    r"|Fatal Python error: )"
)
BEGINNINGS = (b"Traceback (most recent", b"Fatal Python error", b"Group Traceback", b"[rank")
# Within this time a failed process has ended, and its node has reported it.
HELD_SECONDS = 10.0
# One traceback is printed within this time.
BURST_SECONDS = 0.3
# A stream that prints for so long after a traceback has survived the exception.
TALK_SECONDS = 1.0
# The most lines that are held back for one rank.
MOST_HELD = 5000


class HeldStack:
    """Holds back the traceback at the end of a stream while it may be the stream's last output."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.until = self.last = 0.0

    def concerns(self, data: bytes) -> bool:
        """Return True if these bytes have to go through shown(), which is rare."""
        return bool(self.lines) or any(each in data for each in BEGINNINGS)

    def shown(self, lines: list[str], now: float) -> list[str]:
        """Return the lines to print now; hold back the rest."""
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
        """Return the held lines if their time is over, else []."""
        return self.rest() if self.lines and now > self.until else []

    def rest(self) -> list[str]:
        held, self.lines = self.lines, []
        return held


# -- own paths ----------------------------------------------------------------------------------
# Replaces paths of a snapshot by the paths of the working tree, which the user knows. Pure.

# The directory of a snapshot on a node.
SNAPSHOT = r"(?<![^\s\"'(:=,])/[^\s\"':]*?/code/snapshots/[0-9a-f]{8}-[0-9]{1,6}/"


def own_paths_in_text(text: str, tree: str) -> str:
    """Return the text with paths of snapshots of `tree` replaced by paths of `tree`."""
    if not tree or "/code/snapshots/" not in text:
        return text
    title = re.escape(tree_title(tree))
    return re.sub(f"{SNAPSHOT}{title}(?![^/\\s\"':,;)])", lambda _: tree.rstrip("/"), text)


def own_paths_in_verdict(verdict: JobVerdict, tree: str) -> JobVerdict:
    """Return the verdict with the user's paths, to be shown; the record keeps the original."""
    return replace(
        verdict,
        message=own_paths_in_text(verdict.message, tree),
        traceback=own_paths_in_text(verdict.traceback, tree),
        where=own_paths_in_text(verdict.where, tree),
    )
