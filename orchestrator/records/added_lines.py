"""Read the lines that were added to a file of JSON lines since the last look."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from orchestrator import files

PIECE = 8 << 20  # bytes of one look


class AddedLines:
    """A file, and how far it is read. Lines are whole; what is none is passed over."""

    def __init__(self, path: Path, at: int = 0, piece: int = PIECE) -> None:
        self.path, self.at, self.piece = path, at, piece

    def read(self) -> list[dict[str, Any]]:
        """Return what is new, in pieces: an empty list means that there is no more for now."""
        found: list[dict[str, Any]] = []
        while not found:
            whole = self._piece()
            if not whole:
                break
            found = [line for raw in whole.split(b"\n") if (line := parsed(raw)) is not None]
        return found

    def _piece(self) -> bytes:
        try:
            with files.open_plain(self.path) as file:
                if os.fstat(file.fileno()).st_size < self.at:
                    self.at = 0  # written anew
                file.seek(self.at)
                data = file.read(self.piece)
        except OSError:
            return b""
        whole, newline, _ = data.rpartition(b"\n")
        if not newline and len(data) == self.piece:
            whole = data  # a line that long is none of ours
        self.at += len(whole) + len(newline)
        return whole + newline


def parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):  # empty, or cut off by the end of the job
        return None
    return line if isinstance(line, dict) else None
