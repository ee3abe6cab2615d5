"""Keep the code of a run in its experiment, as code.tar.gz, and get it back as it was."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from orchestrator.common import files
from orchestrator.common.errors import CheckFailed
from orchestrator.head.transfer import index
from orchestrator.head.transfer.tree import Changed, Tree
from orchestrator.protocol import manifest as trees
from orchestrator.protocol.manifest import DIRECTORY, FILE, LINK, Entry
from orchestrator.protocol.message import Nonsense

NAME = "code.tar.gz"
TYPES = {FILE: tarfile.REGTYPE, LINK: tarfile.SYMTYPE, DIRECTORY: tarfile.DIRTYPE}
KINDS = {kind: letter for letter, kind in TYPES.items()}
LEVEL = 1
LARGEST_BYTES = 1 << 31


def write(tree: Tree, path: Path) -> bool:
    """Write a tree as it was read; False where files have changed since."""
    packed = io.BytesIO()
    with tarfile.open(
        fileobj=packed,
        mode="w:gz",
        compresslevel=LEVEL,
        format=tarfile.GNU_FORMAT,
        encoding="utf-8",
        errors="surrogateescape",
    ) as archive:
        for entry in tree.entries:
            info = tarfile.TarInfo(text(entry.path))
            info.type, info.mode = TYPES[entry.kind], entry.mode
            content = b""
            if entry.kind == FILE:
                try:
                    content = tree.content(entry)
                except Changed:
                    return False
            elif entry.kind == LINK:
                info.linkname = text(entry.value)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    files.replace(path, packed.getvalue())
    return True


@contextlib.contextmanager
def unpacked(path: Path, digest: str, title: str) -> Iterator[Tree]:
    """Give a directory of this name with the tree of that digest, for as long as it is sent."""
    parent = index.cache()
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="code-", dir=parent))
    try:
        directory = place / (title or "root")
        directory.mkdir()
        yield restore(path, digest, directory)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def restore(path: Path, digest: str, directory: Path) -> Tree:
    """Write the tree of that digest into an empty directory; CheckFailed where it is another."""
    members = readable(path)
    try:
        listing = trees.packed(entry for entry, _ in members)
        trees.unpacked(listing)  # no path leads out of the directory, or through a link
    except Nonsense as error:
        raise CheckFailed(f"{path} cannot be read: {error}") from error
    if trees.digest_of(listing) != digest:
        raise CheckFailed(f"{path} is not the code that this run had: somebody has changed it")
    root = os.fsencode(directory)
    for entry, content in members:
        where = os.path.join(root, entry.path)
        parent = where if entry.kind == DIRECTORY else os.path.dirname(where)
        os.makedirs(parent, mode=0o700, exist_ok=True)
        if entry.kind == LINK:
            os.symlink(entry.value, where)
        elif entry.kind == FILE:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(where, flags, 0o600), "wb") as file:
                file.write(content)
                os.fchmod(file.fileno(), entry.mode)
    return Tree.of(root, (entry for entry, _ in members))


def readable(path: Path) -> list[tuple[Entry, bytes]]:
    try:
        return contents(path)
    except (OSError, tarfile.TarError, EOFError, Nonsense) as error:
        raise CheckFailed(f"{path} cannot be read: {error}") from error


def contents(path: Path) -> list[tuple[Entry, bytes]]:
    """Read every member of an archive."""
    members = []
    total = 0
    with tarfile.open(
        path, mode="r:gz", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as archive:
        for info in archive:
            kind = KINDS.get(info.type)
            total += info.size
            if kind is None or total > LARGEST_BYTES:
                raise Nonsense(f"{info.name} is of no kind that is kept")
            file = archive.extractfile(info) if kind == FILE else None
            content = file.read() if file else b""
            value = hashlib.sha256(content).hexdigest().encode() if kind == FILE else b""
            value = info.linkname.encode("utf-8", "surrogateescape") if kind == LINK else value
            name = info.name.encode("utf-8", "surrogateescape")
            members.append((Entry(name, kind, info.mode, len(content), value), content))
    return members


def text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
