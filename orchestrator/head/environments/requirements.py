"""Reads what an environment is to hold, and makes the key that names it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common import files
from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.common.hiding import redacted_text
from orchestrator.head.environments import refusals
from orchestrator.head.transfer.index import cache as index_cache

LOCK = "uv.lock"
PROJECT = "pyproject.toml"
NAMES = (LOCK, "requirements.txt", PROJECT)
READ_BY_PIP = (".txt", ".in")
SUFFIXES = (*READ_BY_PIP, ".toml", ".lock")
# A package as pip takes it: torch, torch==2.13.0, ray[train]>=2, name @ https://..., a wheel.
PROJECT_NAME = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?\s*(?:\[[\w,. -]*\])?"
VERSION = r"(?:===|==|~=|!=|<=|>=|<|>)\s*[\w.*+!-]+"
PACKAGE = re.compile(
    rf"{PROJECT_NAME}\s*({VERSION}(\s*,\s*{VERSION})*|@\s*\S*(/\S*|\.whl))?\s*(;.*)?"
    r"|\S+\.whl|git\+\S+"
)
# What people type instead, of one package and its version; and before the packages.
NO_VERSION = re.compile(rf"({PROJECT_NAME})\s*(?:=|@|:|\s)\s*v?(\d[\w.*+]*)")
RANGES = re.compile(rf"({PROJECT_NAME})\s*({VERSION}(?:[\s,]+{VERSION})+)")
AS_FOR_PIP = "write packages as for pip, in quotes: orchestrator bootstrap torch 'numpy>=2'"
INSTALLERS = (("uv", "pip", "install"), ("pip", "install"), ("conda", "install"), ("install",))


def cache() -> Path:
    return index_cache() / "environments"


@dataclass(frozen=True)
class Requirements:
    """Says what to install, and where from."""

    file: Path
    text: bytes
    find_links: tuple[str, ...] = ()
    index: bool = True  # ask an index, too
    from_index: bool = False  # each node downloads by itself
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


def read(words: Sequence[str], find_links: tuple[str, ...], *, index: bool) -> Requirements:
    """Read the file named, or the packages; of neither, the first of the usual files here."""
    named = [Path(word) for word in words if is_file(word)]
    if words and (len(words) > 1 or not named):
        return of_words(words, find_links, index=index)
    file = named[0] if named else usual_file()
    if file is None:
        raise UsageError(
            f"there is no {', '.join(NAMES[:-1])} or {NAMES[-1]} here",
            "orchestrator bootstrap FILE, or the packages: orchestrator bootstrap torch numpy",
        )
    try:
        text = included(file, frozenset())
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from error
    return Requirements(file, text, links_of(find_links), index)


def usual_file() -> Path | None:
    return next((Path(name) for name in NAMES if Path(name).is_file()), None)


def is_file(word: str) -> bool:
    """Tell a file of requirements from a package: by its name, or because it is here."""
    path = Path(word)
    return path.suffix in SUFFIXES or (path.suffix != ".whl" and path.is_file())


def of_words(words: Sequence[str], find_links: tuple[str, ...], *, index: bool) -> Requirements:
    """Write packages that were typed into a file as pip and uv read it; files may stand among them.

    Its name is that of the usual file: the same packages make the same environment.
    """
    refuse_redirection(words)
    for installer in INSTALLERS:
        if tuple(words[: len(installer)]) == installer:
            raise UsageError(
                f"{' '.join(installer)} is not a package", type_words(words[len(installer) :])
            )
    lines = []
    for word in words:
        if is_file(word):
            if Path(word).suffix not in READ_BY_PIP:
                raise UsageError(
                    f"{word} cannot stand beside packages", "name it alone, or a requirements.txt"
                )
            lines.append(f"-r {Path(word).absolute()}")
        elif PACKAGE.fullmatch(word):
            local = word.endswith(".whl") and "://" not in word
            lines.append(str(Path(word).absolute()) if local else word)
        else:
            if Path(word).is_dir():
                raise CheckFailed(*refusals.of_directory(word))
            instead = [new for old in words for new in ([old] if old != word else as_for_pip(word))]
            raise UsageError(
                f"{word!r} is neither a file here nor a package",
                type_words(instead) if as_for_pip(word) else AS_FOR_PIP,
            )
    text = "".join(f"{line}\n" for line in sorted(set(lines)))
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    file = cache() / "words" / name / "requirements.txt"
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    files.replace(file, text)
    try:
        content = included(file, frozenset())
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from error
    return Requirements(file, content, links_of(find_links), index, words=", ".join(words))


def as_for_pip(word: str) -> list[str]:
    """Return what was probably meant by a word that is no package; nothing if it is unknown."""
    if lacks := NO_VERSION.fullmatch(word):
        return [f"{lacks[1].rstrip()}=={lacks[2]}"]
    if ranges := RANGES.fullmatch(word):
        return [ranges[1].rstrip() + ",".join(re.findall(VERSION, ranges[2]))]
    parts = re.split(r"\s*[,\s]\s*", word.strip())
    return parts if len(parts) > 1 and all(map(PACKAGE.fullmatch, parts)) else []


def refuse_redirection(words: Sequence[str]) -> None:
    """Refuse what a shell makes of numpy>=2 without quotes: numpy, and our output in a file =2."""
    with contextlib.suppress(OSError):
        file = Path("/proc/self/fd/1").readlink()
        if file.name.startswith("="):
            meant = type_words([*words[:-1], f"{words[-1]}>{file.name}"])
            raise UsageError(f"the shell takes >{file.name} for a file, {file}", meant)


def type_words(words: Sequence[str]) -> str:
    return f"type: {shlex.join(['orchestrator', 'bootstrap', *words])}"


def links_of(find_links: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(Path(link).absolute()) if Path(link).is_dir() else link for link in find_links)


def included(file: Path, seen: frozenset[Path]) -> bytes:
    """Return the text of a file, and of those that a requirements file includes by -r and -c."""
    text = file.read_bytes()
    if file.suffix not in READ_BY_PIP or file in seen:
        return text
    for line in text.decode(errors="replace").splitlines():
        words = line.replace("=", " ", 1).split()
        if len(words) > 1 and words[0] in ("-r", "--requirement", "-c", "--constraint"):
            text += b"\0" + included(file.parent / words[1], seen | {file})
    return text


# -- the hashes that a user wrote: what is installed has to have them ------------------------------
# uv names all hashes that the index has of a version; of these the user's stay, which pip checks.

HASH = re.compile(r"\s*\\?\s*--hash[= ](sha256|sha384|sha512):([0-9A-Fa-f]+)")
NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")

Hashes = Mapping[str, frozenset[str]]  # a package, and algorithm:digest of each file allowed


def hashes_of(text: bytes) -> Hashes:
    """Return the hashes of a requirements file, and of the files that it includes."""
    found: dict[str, frozenset[str]] = {}
    for line in lines_of(text.decode(errors="replace").replace("\0", "\n")):
        name = NAME.match(line)
        allowed = frozenset(f"{kind}:{value.lower()}" for kind, value in HASH.findall(line))
        if name and allowed:
            key = refusals.normal(name[1])
            found[key] = found.get(key, frozenset()) | allowed
    return found


def lines_of(text: str) -> list[str]:
    """Return the lines, with those that a backslash continues put together."""
    return [line for line in re.sub(r"\\\r?\n", " ", text).splitlines() if line.strip()]


def keep_hashes(pinned: str, allowed: Hashes, what: str) -> str:
    """Leave of the hashes that an index names for each version those that the user allows."""
    lines = []
    for line in lines_of(pinned):
        name = NAME.match(line)
        theirs = allowed.get(refusals.normal(name[1])) if name else None
        if theirs is None:
            lines.append(line)
            continue
        hashes = sorted(theirs & {f"{kind}:{value}" for kind, value in HASH.findall(line)})
        if not hashes:
            raise CheckFailed(
                f"{what}:\n    none of the hashes of {line.split()[0]} in the file is one"
                " of the index",
                "do not install it before you know why; after an intended change, write the file's"
                " hashes again (uv pip compile --generate-hashes, pip hash WHEEL)",
            )
        lines.append(
            " ".join([HASH.sub("", line).strip(), *(f"--hash={digest}" for digest in hashes)])
        )
    return "\n".join(lines) + "\n"
