"""Remember the digests of files, so that one that did not change costs one lstat.

A file counts as unchanged while its size, both times and its inode are the same. One that had been
written in the second before it was read is not remembered: a second change could look the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from orchestrator.common import files

Known = tuple[int, int, int, int, str]  # size, mtime, ctime (ns), inode, SHA-256
FRESH_NANOSECONDS = 1_000_000_000


def cache() -> Path:
    """Return the user's cache directory of ours."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "orchestrator"


class Index:
    """The digests of one directory's files, as they were when they were last read."""

    def __init__(self, directory: bytes) -> None:
        self.path = cache() / "trees" / f"{hashlib.sha256(directory).hexdigest()[:32]}.json"
        self.known: dict[str, Known] = {}
        self.seen: dict[str, Known] = {}
        with contextlib.suppress(OSError, ValueError, TypeError):
            rows = json.loads(self.path.read_text(encoding="ascii"))
            self.known = {path: tuple(row) for path, row in rows.items()}

    def digest(self, path: bytes, status: os.stat_result) -> str:
        """Return the digest of an unchanged file, or nothing."""
        name = os.fsdecode(path)
        row = self.known.get(name)
        if row is None or row[:4] != files.state_of(status):
            return ""
        self.seen[name] = row
        return row[4]

    def note(self, path: bytes, status: os.stat_result, digest: str, now: int) -> None:
        """Remember what a file held at `now`, a time in nanoseconds before it was read."""
        if max(status.st_mtime_ns, status.st_ctime_ns) + FRESH_NANOSECONDS < now:
            self.seen[os.fsdecode(path)] = (*files.state_of(status), digest)

    def save(self) -> None:
        """Keep what was seen; without it the next scan reads everything again."""
        if self.seen == self.known:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.replace(self.path, json.dumps(self.seen))
