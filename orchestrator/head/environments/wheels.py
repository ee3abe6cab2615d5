"""Resolves requirements for each kind of node, and downloads its wheels once, on the head.

uv resolves, because it follows the markers of another platform; pip downloads, because it knows the
head's own indexes, mirrors and certificates. Both check the index's hashes, and the user's.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

from orchestrator.common import files
from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.common.hiding import redacted_text
from orchestrator.common.text import size
from orchestrator.head.environments import refusals
from orchestrator.head.environments.requirements import (
    LOCK,
    READ_BY_PIP,
    Requirements,
    cache,
    hashes_of,
    included,
    keep_hashes,
)
from orchestrator.head.screen.output import say

UV_GLIBC = (40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 28, 17)  # the platforms that uv has names for
LONGEST_SECONDS = 3600.0  # for a download
QUIET_SECONDS = 15.0  # after which a program that works is spoken of
LAST_LINES = 8
UNUSED_SECONDS = 30 * 86400.0  # after which downloads are old
LOCKED = "locked.txt"
PINNED = "pinned.txt"  # exact versions, with hashes
EDITABLE = re.compile(r"(?:-e|--editable)[ =]\s*(\S.*?)\s*$")
PLACE = re.compile(r"^(?:[\w.-]+(?:\[[^]]*\])?\s*@\s*)?(?:file://)?")


@dataclass(frozen=True)
class Kind:
    """The nodes that the same wheels fit."""

    version: tuple[int, int]
    machine: str
    libc: str  # glibc 2.36, or musl

    def __str__(self) -> str:
        return f"Python {self.version[0]}.{self.version[1]} on {self.machine}, {self.libc}"

    @property
    def minor(self) -> int:
        """The second number of glibc's version."""
        number = self.libc.rpartition(".")[2]
        return int(number) if number.isdigit() else 17

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
        options = ["--only-binary=:all:", "--python-version", ".".join(map(str, self.version))]
        return [*options, *(word for tag in self.pip_platforms for word in ("--platform", tag))]


def run(
    words: Sequence[str],
    what: str,
    *,
    env: Mapping[str, str] | None = None,
    into: Path | None = None,
) -> str:
    """Run a program to its end and return what it printed; its last lines say why it failed.

    What it unpacks meanwhile is on the disk of `into`, and goes with its end, whatever that is.
    """
    name = words[2] if words[0] == sys.executable else Path(words[0]).name
    try:
        with tempfile.TemporaryDirectory(dir=into and into.parent, prefix=".") as place:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env={**os.environ, **({"TMPDIR": place} if into else {}), **(env or {})},
            )
            printed, said = ended(process, name, [Path(place), *([into] if into else [])])
    except (OSError, TimeoutError) as error:
        raise CheckFailed(f"{what}: {error}") from error
    if process.returncode < 0:
        killed = f"{name} was ended from outside, by {signal.Signals(-process.returncode).name}"
        raise CheckFailed(killed, "type the command again; if memory ran out, dmesg has a line")
    if process.returncode:
        lines = [line for line in redacted_text(said).splitlines() if line.strip()]
        last = "\n    ".join(lines[-LAST_LINES:])
        raise CheckFailed(f"{what}:\n    {last}", refusals.fix_of(said))
    return printed


def ended(process: subprocess.Popen[str], name: str, places: Sequence[Path]) -> tuple[str, str]:
    """Wait until a program has ended, and say now and then how much has come into these places."""
    began = time.monotonic()
    try:
        while True:
            try:
                return process.communicate(timeout=QUIET_SECONDS)
            except subprocess.TimeoutExpired:
                seconds = time.monotonic() - began
            if seconds > LONGEST_SECONDS:
                raise TimeoutError(f"{name} has not ended after {seconds:.0f} s")
            say(f"{name} has worked for {seconds:.0f} s: {size(size_of(places))} so far")
    finally:
        process.kill()


def size_of(places: Sequence[Path]) -> int:
    total = 0
    for path in (path for place in places for path in place.rglob("*")):
        with contextlib.suppress(OSError):  # renamed meanwhile
            total += path.lstat().st_size
    return total


def pip(*words: str) -> list[str]:
    return [sys.executable, "-m", "pip", *words, "--disable-pip-version-check", "--no-input", "-q"]


# -- pip's own settings -------------------------------------------------------------------------

SECTIONS = ("global", "install", "download", ":env:")  # what a later one says wins
UV_NAMES = {
    "index-url": "UV_INDEX_URL",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}
OF_INDEXES = ("index-url", "extra-index-url", "find-links")


@functools.cache
def settings_of_pip() -> Mapping[str, str]:
    """Return what pip's files and variables say, which uv does not read, for what it knows too."""
    words = [sys.executable, "-m", "pip", "config", "list"]
    # They would say which of its files are listed, and may be meant for `pip install`.
    every = dict.fromkeys(("PIP_USER", "PIP_GLOBAL", "PIP_SITE"), "0")
    lines = run(words, "pip cannot read its configuration", env=every).splitlines()
    found = {}
    for section in SECTIONS:
        for name, _, value in (line.partition("=") for line in lines):
            where, _, key = name.rpartition(".")
            text = " ".join(str(ast.literal_eval(value)).split()) if key in UV_NAMES else ""
            if where == section and text:  # as pip does, which passes over empty ones
                found[key] = text
    return found


def variables_of_uv(sources: Requirements) -> dict[str, str]:
    """Return pip's settings as variables of uv: anyone can read a command line with a password."""
    found = dict(settings_of_pip())
    theirs = any(name.startswith("UV_") and "INDEX" in name for name in os.environ)
    for key in OF_INDEXES:
        if theirs or not sources.index:
            found.pop(key, None)
    if b"--index-url" in sources.text:
        found.pop("index-url", None)
    links = found.pop("find-links", "").split()
    local = {link: Path(link).expanduser() for link in links if "://" not in link}
    there = [
        str(local.get(link, link)) for link in links if link not in local or local[link].exists()
    ]
    if there:  # pip passes over those that are not, and uv refuses them
        found["find-links"] = ",".join(there)
    strategy = {"UV_INDEX_STRATEGY": "unsafe-best-match"} if {*OF_INDEXES} & {*found} else {}
    return {**strategy, **{UV_NAMES[key]: value for key, value in found.items()}}


def constrained(sources: Requirements) -> Requirements:
    """Let pip's own constraints decide which environment it is, as what is written into a file."""
    try:
        texts = [
            included(Path(place), frozenset()) if Path(place).exists() else place.encode()
            for place in settings_of_pip().get("constraint", "").split()
        ]
    except OSError as error:
        what = f"{error.filename}, of pip's constraints, cannot be read: {error.strerror}"
        raise UsageError(what, f"see `{refusals.PIP} config list`") from error
    return replace(sources, text=b"\0".join([sources.text, *texts]))


# -- uv ---------------------------------------------------------------------------------------


def uv_for(machine: str, libc: str, sources: Requirements) -> Path | None:
    """Return uv's program for such a machine, downloaded once; None where it cannot be had."""
    musl = not libc.startswith("glibc")
    directory = cache() / "uv" / f"{machine}-{'musl' if musl else 'glibc'}"
    program = directory / "uv"
    if program.exists():
        return program
    tags = [f"musllinux_1_1_{machine}"] if musl else [f"manylinux2014_{machine}"]
    tags += [] if musl else [f"manylinux_2_17_{machine}", f"manylinux_2_28_{machine}"]
    words = [word for tag in tags for word in ("--platform", tag)]
    new = fresh(directory)
    try:
        options = ("--no-deps", "--only-binary=:all:", *words, "-d", str(new))
        words = pip("download", *options, *where(sources), "uv")
        run(words, "uv cannot be downloaded", into=new)
        (wheel,) = new.glob("uv-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".data/scripts/uv")]
            (new / "uv").write_bytes(archive.read(name))
        (new / "uv").chmod(0o755)
        wheel.unlink()
        put_in_place(new, directory)
    except (CheckFailed, ValueError, OSError, zipfile.BadZipFile):
        shutil.rmtree(new, ignore_errors=True)
        return None
    return program


def where(sources: Requirements) -> list[str]:
    """Return the options that say where packages come from."""
    links = [word for link in sources.find_links for word in ("--find-links", link)]
    return [*links, *([] if sources.index else ["--no-index"])]


def fresh(path: Path) -> Path:
    """Make an empty directory beside the path, for what takes its place when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.parent / f".{path.name}.{os.urandom(4).hex()}.new"
    new.mkdir(mode=0o700)
    return new


def put_in_place(new: Path, path: Path) -> None:
    try:
        new.rename(path)
    except OSError:  # another command was faster
        shutil.rmtree(new, ignore_errors=True)


# -- wheels -----------------------------------------------------------------------------------


def wheels_for(kind: Kind, key: str, sources: Requirements) -> Path:
    """Download the wheels for one kind of node, unless they are here from an earlier call."""
    how = "index" if sources.from_index else "wheels"
    directory = cache() / how / f"{key}-{kind.libc.replace(' ', '-')}"
    if directory.is_dir():
        os.utime(directory)  # those that nobody used for a while are pruned
        return directory
    say(f"{kind}: {'resolves' if sources.from_index else 'downloads'} {sources.title}")
    what = f"the requirements of {sources.title} cannot be met for {kind}"
    new = fresh(directory)
    try:
        pinned, options = pins(kind, sources, new, what)
        if Path(pinned).parent == new:  # else it is the user's own file, with hashes or without
            check_projects(Path(pinned))
            locked = new / LOCKED  # of a lock: the hashes are in it
            allowed = hashes_of(locked.read_bytes() if locked.exists() else sources.text)
            Path(pinned).write_text(keep_hashes(Path(pinned).read_text(), allowed, what))
        if not sources.from_index:
            options = [*options, *kind.pip_options, "-d", str(new)]
            run(pip("download", *options, "-r", pinned), what, into=new)
        for path in new.iterdir():
            if path.suffix not in (".whl", ".txt"):
                raise CheckFailed(
                    f"{what}:\n    {path.name} is not a wheel",
                    refusals.build("PROJECT"),
                )
            if path.suffix == ".txt" and not (sources.from_index and path.name == PINNED):
                path.unlink()
        program = uv_for(kind.machine, kind.libc, sources)
        if program is not None:
            shutil.copy(program, new / "uv")
        put_in_place(new, directory)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return directory


def pins(kind: Kind, sources: Requirements, new: Path, what: str) -> tuple[str, list[str]]:
    """Resolve the requirements by uv; without uv, pip resolves while it downloads."""
    glibc = platform.libc_ver()[0] == "glibc"
    uv = uv_for(platform.machine(), "glibc" if glibc else "musl", sources)
    if uv is None:
        if sources.file.suffix not in READ_BY_PIP or sources.from_index:
            raise CheckFailed(
                f"{sources.file} has to be read by uv, which cannot be downloaded here",
                "write a requirements.txt, or pip download uv where there is an index",
            )
        return str(sources.file), where(sources)
    file = str(sources.file)
    if sources.file.name == LOCK:
        file = str(new / LOCKED)
        words = ["export", "-q", "--frozen", "--no-dev", "--no-emit-project"]
        run([str(uv), *words, "--project", str(sources.file.parent), "-o", file], what)
    pinned = str(new / PINNED)
    words = ["pip", "compile", "-q", "--no-header", "--no-annotate", "--emit-index-url"]
    words += ["--only-binary", ":all:", "--python-platform", kind.uv_platform]
    words += ["--python-version", ".".join(map(str, kind.version)), *where(sources)]
    words += ["--generate-hashes"]
    run([str(uv), *words, "-o", pinned, file], what, env=variables_of_uv(sources))
    return pinned, ["--no-deps", *where(sources)]


def check_projects(pinned: Path) -> None:
    """Refuse directories to install; say of editable ones that their code travels by itself."""
    lines = []
    for line in pinned.read_text().splitlines(keepends=True):
        editable = EDITABLE.match(line)
        if editable:
            say(
                f"{editable[1]} is not installed, only what it needs: code travels with each launch"
            )
            continue
        bare = line.partition(" #")[0].partition(" ;")[0].strip()
        place = PLACE.sub("", bare).partition("[")[0]
        place = unquote(place) if "file://" in bare else place
        if place and not place.startswith("-") and Path(place).is_dir():
            raise CheckFailed(*refusals.of_directory(place))
        lines.append(line)
    pinned.write_text("".join(lines))


def prune(now: float) -> int:
    """Remove downloads that no bootstrap used for a while; return how many bytes went."""
    freed: list[int] = []
    for how in ("index", "wheels", "words"):
        for path in (cache() / how).glob("*"):
            if path.is_dir() and now - path.stat().st_mtime > UNUSED_SECONDS:
                files.delete(path, freed.append)
    return sum(freed)
