"""The packages of an environment, downloaded once on the head for each kind of node.

pip resolves and downloads, with the head's own indexes, mirrors, certificates and the hashes of the
file. It reads no project and no lock file, and evaluates markers for this machine only. For those
files, and for nodes of another kind, uv pins the versions first.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common import files
from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.common.hiding import redacted_text
from orchestrator.head.screen.events import say
from orchestrator.head.transfer.scan import cache_directory

LOCK = "uv.lock"
NAMES = (LOCK, "requirements.txt", "pyproject.toml")
READ_BY_PIP = (".txt", ".in")
SUFFIXES = (*READ_BY_PIP, ".toml", ".lock")
INCLUDED = re.compile(r"^\s*(?:-r|--requirement|-c|--constraint)[ =]+['\"]?([^'\"\s]+)", re.M)


@dataclass(frozen=True)
class Requirements:
    """The packages to install, and their sources."""

    file: Path
    # The text of the file and of the files that it includes.
    text: bytes
    title: str = ""
    find_links: tuple[str, ...] = ()
    # True if pip may use an index as well.
    index: bool = True

    @property
    def where(self) -> list[str]:
        """Return pip's options for the sources of packages."""
        links = [word for link in self.find_links for word in ("--find-links", link)]
        return [*links, *([] if self.index else ["--no-index"])]


def read_requirements(
    words: Sequence[str], find_links: Sequence[str] = (), *, index: bool
) -> Requirements:
    """Return the requirements: a file or packages, else the first file of NAMES here."""
    links = tuple(
        str(Path(link).absolute()) if Path(link).is_dir() else link for link in find_links
    )
    file = next((Path(name) for name in NAMES if Path(name).is_file()), None)
    title = str(file)
    if len(words) == 1 and is_file(words[0]):
        file, title = Path(words[0]), words[0]
    elif words:
        file, title = write_requirements(words), redacted_text(", ".join(words))
    if file is None:
        raise UsageError(
            f"there is no {', '.join(NAMES[:-1])} or {NAMES[-1]} here",
            "orchestrator bootstrap FILE, or the packages: orchestrator bootstrap torch numpy",
        )
    try:
        text = included_text(file, frozenset())
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from error
    return Requirements(file, text, title, links, index)


def is_file(word: str) -> bool:
    """Return True for a requirements file, by its suffix or because it exists."""
    path = Path(word)
    return path.suffix in SUFFIXES or (path.suffix != ".whl" and path.is_file())


def write_requirements(words: Sequence[str]) -> Path:
    """Write packages and requirements files of the command line into one file; return it.

    Its name is requirements.txt, so the same packages have the same key as such a file.
    """
    lines = []
    for word in words:
        if is_file(word) and Path(word).suffix not in READ_BY_PIP:
            raise UsageError(
                f"{word} cannot be combined with packages", "name it alone, or a requirements.txt"
            )
        if word.startswith("-") or any(character.isspace() for character in word.strip()):
            raise UsageError(
                f"{word!r} is neither a file here nor a package",
                "write packages as for pip, in quotes: orchestrator bootstrap torch 'numpy>=2'",
            )
        local = is_file(word) or Path(word).is_file()
        place = shlex.quote(str(Path(word).absolute())) if local else word
        lines.append(f"-r {place}" if is_file(word) else place)
    text = "".join(f"{line}\n" for line in sorted(set(lines)))
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    file = environments_cache() / "words" / name / "requirements.txt"
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    files.replace_file(file, text)
    return file


def included_text(file: Path, seen: frozenset[Path]) -> bytes:
    """Return the text of a file, and of those that a requirements file includes by -r and -c."""
    text = file.read_bytes()
    if file.suffix in READ_BY_PIP and file not in seen:
        for name in INCLUDED.findall(text.decode(errors="replace")):
            text += b"\0" + included_text(file.parent / name, seen | {file})
    return text


def environments_cache() -> Path:
    return cache_directory() / "environments"


# -- kinds of nodes --------------------------------------------------------------------------------

# The glibc versions for which uv has platform names.
UV_GLIBC = (40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 28, 17)


@dataclass(frozen=True)
class Kind:
    """A kind of node: all its nodes can use the same wheels."""

    version: tuple[int, int]
    machine: str
    # Such as "glibc 2.36", or "musl".
    libc: str

    def __str__(self) -> str:
        return f"Python {self.python} on {self.machine}, {self.libc}"

    @property
    def python(self) -> str:
        return f"{self.version[0]}.{self.version[1]}"

    @property
    def minor(self) -> int:
        """Return the second number of glibc's version; 17 for musl."""
        number = self.libc.rpartition(".")[2]
        return int(number) if number.isdigit() else 17

    @property
    def is_like_here(self) -> bool:
        """Return True if markers of requirements evaluate on these nodes as on this machine."""
        here = (*sys.version_info[:2], sys.platform, platform.machine())
        return here == (*self.version, "linux", self.machine)

    @property
    def pip_platforms(self) -> list[str]:
        if not self.libc.startswith("glibc"):
            return [f"musllinux_1_{minor}_{self.machine}" for minor in (2, 1)]
        tags = [f"manylinux_2_{minor}" for minor in range(self.minor, 4, -1)]
        tags += ["manylinux2014", "manylinux2010", "manylinux1", "linux"]
        return [f"{tag}_{self.machine}" for tag in tags]

    @property
    def uv_platform(self) -> str:
        if not self.libc.startswith("glibc"):
            return f"{self.machine}-unknown-linux-musl"
        minor = next((known for known in UV_GLIBC if known <= self.minor), 17)
        return f"{self.machine}-manylinux_2_{minor}"

    @property
    def pip_options(self) -> list[str]:
        options = ["--only-binary=:all:", "--python-version", self.python]
        return [*options, *(word for tag in self.pip_platforms for word in ("--platform", tag))]

    def key(self, sources: Requirements) -> str:
        """Return the key of the environment that these requirements make on this kind of node."""
        kind = self.libc.partition(" ")[0]
        links = list(sources.find_links)
        parts = [sources.file.name, [*self.version], self.machine, kind, links, sources.index]
        return hashlib.sha256(json.dumps(parts).encode() + sources.text).hexdigest()[:16]


# -- wheels ----------------------------------------------------------------------------------------

# The time limit of a download.
LONGEST_SECONDS = 3600.0
LAST_LINES = 8


def run_program(words: Sequence[str], what: str) -> None:
    """Run a program; raise CheckFailed with its last lines if it fails."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LONGEST_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckFailed(f"{what}: {error}") from error
    if done.returncode:
        lines = [line for line in redacted_text(done.stdout).splitlines() if line.strip()]
        last = "\n    ".join(lines[-LAST_LINES:])
        raise CheckFailed(f"{what}:\n    {last}", f"look at: {sys.executable} -m pip config list")


def download_wheels(sources: Requirements, into: Path, what: str, *words: str) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    run_program([*pip, "-q", *sources.where, "-d", str(into), *words], what)


def wheels_for(kind: Kind, sources: Requirements) -> Path:
    """Return the directory of the wheels for a kind of node; download them if it is missing."""
    name = f"{kind.key(sources)}-{kind.libc.replace(' ', '-')}"
    directory = environments_cache() / "wheels" / name
    if directory.is_dir():
        return directory
    say(f"{kind}: downloads {sources.title}")
    what = f"the requirements of {sources.title} cannot be met for {kind}"
    directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = directory.parent / f".{name}.{os.urandom(4).hex()}.new"
    new.mkdir(mode=0o700)
    try:
        download_wheels(
            sources, new, what, *kind.pip_options, *pip_options(kind, sources, new, what)
        )
        (new / "pinned.txt").unlink(missing_ok=True)
        for path in new.iterdir():
            if path.suffix != ".whl":
                raise CheckFailed(f"{what}:\n    {path.name} is not a wheel")
        add_uv(kind, sources, new)
        new.rename(directory)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return directory


def pip_options(kind: Kind, sources: Requirements, new: Path, what: str) -> list[str]:
    """Return pip's options for the requirements; uv pins them first if pip cannot read them."""
    file, uv = sources.file, shutil.which("uv")
    hashed = b"--hash" in sources.text or file.name == LOCK
    if hashed and not kind.is_like_here:
        raise CheckFailed(
            f"{file} has hashes, which are checked for Python"
            f" {sys.version_info[0]}.{sys.version_info[1]} on {platform.machine()} alone, as here;"
            f" there are nodes with {kind}",
            "choose that Python with --python, or leave the hashes out",
        )
    if file.suffix in READ_BY_PIP and kind.is_like_here:
        return ["-r", str(file)]
    if uv is None:
        raise CheckFailed(
            f"{sources.title} has to be read by uv for {kind}, and there is no uv on this machine",
            f"{sys.executable} -m pip install uv, or write a requirements.txt",
        )
    pinned = str(new / "pinned.txt")
    if file.name == LOCK:
        words = ["export", "-q", "--frozen", "--no-dev", "--no-emit-project"]
        words += ["--project", str(file.parent), "-o", pinned]
    else:
        words = ["pip", "compile", "-q", "--no-header", "--no-annotate", "--emit-index-url"]
        words += ["--only-binary", ":all:", "--python-platform", kind.uv_platform]
        words += ["--python-version", kind.python, *sources.where, "-o", pinned, str(file)]
    run_program([uv, *words], what)
    return ["--no-deps", "-r", pinned]


def add_uv(kind: Kind, sources: Requirements, directory: Path) -> None:
    """Add the uv binary, which installs faster than pip and needs no ensurepip.

    If uv cannot be downloaded, the nodes install with pip.
    """
    place = directory / "of uv"
    try:
        words = ("--no-deps", *kind.pip_options, "uv")
        download_wheels(sources, place, "uv cannot be downloaded", *words)
        (wheel,) = place.glob("uv-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".data/scripts/uv")]
            (directory / "uv").write_bytes(archive.read(name))
        (directory / "uv").chmod(0o755)
    except (CheckFailed, ValueError, OSError, zipfile.BadZipFile):
        say("uv cannot be downloaded: pip installs on the nodes")
    shutil.rmtree(place, ignore_errors=True)
