"""Downloads the wheels of requirements once, on the head, for each kind of node.

pip resolves and downloads, with the head's own indexes, mirrors, certificates and the hashes of the
file. It reads no project and no lock, and knows the markers of this machine alone: for those, and
for nodes of another kind, uv writes down the versions first.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.errors import CheckFailed
from orchestrator.common.hiding import redacted_text
from orchestrator.head.environments.requirements import LOCK, READ_BY_PIP, Requirements, cache
from orchestrator.head.screen.output import say

UV_GLIBC = (40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 28, 17)  # the platforms that uv has names for
LONGEST_SECONDS = 3600.0  # for a download
LAST_LINES = 8


@dataclass(frozen=True)
class Kind:
    """The nodes that the same wheels fit."""

    version: tuple[int, int]
    machine: str
    libc: str  # glibc 2.36, or musl

    def __str__(self) -> str:
        return f"Python {self.version[0]}.{self.version[1]} on {self.machine}, {self.libc}"

    @property
    def python(self) -> str:
        return ".".join(map(str, self.version))

    @property
    def minor(self) -> int:
        """The second number of glibc's version."""
        number = self.libc.rpartition(".")[2]
        return int(number) if number.isdigit() else 17

    @property
    def is_like_here(self) -> bool:
        """Return True if the markers of requirements mean the same on these nodes as here."""
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


def run(words: Sequence[str], what: str) -> None:
    """Run a program to its end; its last lines say why it failed."""
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


def download(sources: Requirements, into: Path, what: str, *words: str) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    run([*pip, "-q", *where(sources), "-d", str(into), *words], what)


def where(sources: Requirements) -> list[str]:
    """Return the options that say where packages come from."""
    links = [word for link in sources.find_links for word in ("--find-links", link)]
    return [*links, *([] if sources.index else ["--no-index"])]


def wheels_for(kind: Kind, key: str, sources: Requirements) -> Path:
    """Download the wheels for one kind of node, unless they are here from an earlier call."""
    directory = cache() / "wheels" / f"{key}-{kind.libc.replace(' ', '-')}"
    if directory.is_dir():
        return directory
    say(f"{kind}: downloads {sources.title}")
    what = f"the requirements of {sources.title} cannot be met for {kind}"
    directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = directory.parent / f".{directory.name}.{os.urandom(4).hex()}.new"
    new.mkdir(mode=0o700)
    try:
        download(sources, new, what, *kind.pip_options, *pins(kind, sources, new, what))
        for path in new.iterdir():
            if path.suffix == ".txt":
                path.unlink()
            elif path.suffix != ".whl":
                raise CheckFailed(f"{what}:\n    {path.name} is not a wheel")
        add_uv(kind, sources, new)
        new.rename(directory)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return directory


def pins(kind: Kind, sources: Requirements, new: Path, what: str) -> list[str]:
    """Return the file of requirements as pip's options; uv writes it where pip cannot read them."""
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
    pinned = new / "pinned.txt"
    if file.name == LOCK:
        words = ["export", "-q", "--frozen", "--no-dev", "--no-emit-project"]
        run([uv, *words, "--project", str(file.parent), "-o", str(pinned)], what)
    else:
        words = ["pip", "compile", "-q", "--no-header", "--no-annotate", "--emit-index-url"]
        words += ["--only-binary", ":all:", "--python-platform", kind.uv_platform]
        words += ["--python-version", kind.python, *where(sources)]
        run([uv, *words, "-o", str(pinned), str(file)], what)
    return ["--no-deps", "-r", str(pinned)]


def add_uv(kind: Kind, sources: Requirements, directory: Path) -> None:
    """Add uv's program, which installs faster and needs no ensurepip; without it, pip does it."""
    place = directory / "of uv"
    try:
        words = ("--no-deps", *kind.pip_options, "uv")
        download(sources, place, "uv cannot be downloaded", *words)
        (wheel,) = place.glob("uv-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".data/scripts/uv")]
            (directory / "uv").write_bytes(archive.read(name))
        (directory / "uv").chmod(0o755)
    except (CheckFailed, ValueError, OSError, zipfile.BadZipFile):
        say("uv cannot be downloaded: pip installs on the nodes")
    shutil.rmtree(place, ignore_errors=True)
