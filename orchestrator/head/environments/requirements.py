"""Reads what an environment is to hold, and makes the key that names it."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common import files
from orchestrator.common.errors import UsageError
from orchestrator.common.hiding import redacted_text
from orchestrator.head.transfer.index import cache as index_cache

LOCK = "uv.lock"
PROJECT = "pyproject.toml"
NAMES = (LOCK, "requirements.txt", PROJECT)
READ_BY_PIP = (".txt", ".in")
SUFFIXES = (*READ_BY_PIP, ".toml", ".lock")


def cache() -> Path:
    return index_cache() / "environments"


@dataclass(frozen=True)
class Requirements:
    """Says what to install, and where from."""

    file: Path
    text: bytes
    find_links: tuple[str, ...] = ()
    index: bool = True  # ask an index as well
    words: str = ""  # the packages as they were typed, where no file names them

    @property
    def title(self) -> str:
        return redacted_text(self.words) or str(self.file)

    def key(self, version: tuple[int, int], machine: str, libc: str) -> str:
        """Name the environment that these requirements make on such a machine."""
        kind = libc.partition(" ")[0]
        parts = [self.file.name, [*version], machine, kind, list(self.find_links), self.index]
        digest = hashlib.sha256(json.dumps(parts).encode() + self.text)
        return digest.hexdigest()[:16]


def read(words: Sequence[str], find_links: Sequence[str], *, index: bool) -> Requirements:
    """Read the file named, or the packages; of neither, the first of the usual files here."""
    links = tuple(
        str(Path(link).absolute()) if Path(link).is_dir() else link for link in find_links
    )
    file = next((Path(name) for name in NAMES if Path(name).is_file()), None)
    if len(words) == 1 and is_file(words[0]):
        file = Path(words[0])
    elif words:
        file = written(words)
    if file is None:
        raise UsageError(
            f"there is no {', '.join(NAMES[:-1])} or {NAMES[-1]} here",
            "orchestrator bootstrap FILE, or the packages: orchestrator bootstrap torch numpy",
        )
    try:
        text = included(file, frozenset())
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from error
    typed = "" if len(words) == 1 and is_file(words[0]) else ", ".join(words)
    return Requirements(file, text, links, index, typed)


def is_file(word: str) -> bool:
    """Return True for a file of requirements: by its name, or because it is here."""
    path = Path(word)
    return path.suffix in SUFFIXES or (path.suffix != ".whl" and path.is_file())


def written(words: Sequence[str]) -> Path:
    """Write packages that were typed, and files among them, into a file as pip reads it.

    Its name is that of the usual file: the same packages make the same environment.
    """
    lines = []
    for word in words:
        local = Path(word).is_file()
        if is_file(word) and Path(word).suffix not in READ_BY_PIP:
            raise UsageError(
                f"{word} cannot be combined with packages", "name it alone, or a requirements.txt"
            )
        if word.startswith("-") or any(character.isspace() for character in word.strip()):
            raise UsageError(
                f"{word!r} is neither a file here nor a package",
                "write packages as for pip, in quotes: orchestrator bootstrap torch 'numpy>=2'",
            )
        place = shlex.quote(str(Path(word).absolute())) if local or is_file(word) else word
        lines.append(f"-r {place}" if is_file(word) else place)
    text = "".join(f"{line}\n" for line in sorted(set(lines)))
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    file = cache() / "words" / name / "requirements.txt"
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    files.replace(file, text)
    return file


def included(file: Path, seen: frozenset[Path]) -> bytes:
    """Return the text of a file, and of those that a requirements file includes by -r and -c."""
    text = file.read_bytes()
    if file.suffix not in READ_BY_PIP or file in seen:
        return text
    for line in text.decode(errors="replace").splitlines():
        words = [word.strip("'\"") for word in line.replace("=", " ", 1).split()]
        if len(words) > 1 and words[0] in ("-r", "--requirement", "-c", "--constraint"):
            text += b"\0" + included(file.parent / words[1], seen | {file})
    return text
