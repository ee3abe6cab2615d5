"""Reads what an environment is to hold, and makes the key that names it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.errors import UsageError

LOCK = "uv.lock"
PROJECT = "pyproject.toml"
NAMES = (LOCK, "requirements.txt", PROJECT)


@dataclass(frozen=True)
class Requirements:
    """A file that says what to install, and where from."""

    file: Path
    text: bytes
    find_links: tuple[str, ...] = ()
    index: bool = True  # ask an index, too
    from_index: bool = False  # each node downloads by itself

    def key(self, version: tuple[int, int], machine: str, libc: str) -> str:
        """Name the environment that these requirements make on such a machine."""
        kind = libc.partition(" ")[0]
        parts = [self.file.name, [*version], machine, kind, list(self.find_links), self.index]
        digest = hashlib.sha256(json.dumps(parts).encode() + self.text)
        return digest.hexdigest()[:16]


def read(file: Path | None, find_links: tuple[str, ...], *, index: bool) -> Requirements:
    """Read the file named, or the first of uv.lock, requirements.txt and pyproject.toml here."""
    if file is None:
        file = next((Path(name) for name in NAMES if Path(name).is_file()), None)
        if file is None:
            raise UsageError(
                f"there is no {', '.join(NAMES[:-1])} or {NAMES[-1]} here",
                "orchestrator bootstrap FILE",
            )
    try:
        text = included(file, frozenset())
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from error
    links = tuple(
        str(Path(link).absolute()) if Path(link).is_dir() else link for link in find_links
    )
    return Requirements(file, text, links, index)


def included(file: Path, seen: frozenset[Path]) -> bytes:
    """Return the text of a file, and of those that a requirements file includes by -r and -c."""
    text = file.read_bytes()
    if file.suffix not in (".txt", ".in") or file in seen:
        return text
    for line in text.decode(errors="replace").splitlines():
        words = line.replace("=", " ", 1).split()
        if len(words) > 1 and words[0] in ("-r", "--requirement", "-c", "--constraint"):
            text += b"\0" + included(file.parent / words[1], seen | {file})
    return text
