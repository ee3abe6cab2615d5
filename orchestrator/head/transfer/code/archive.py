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
    """Write a tree as it was read; return False where files have changed since."""
    try:
        with (
            files.replacing(path) as packed,
            tarfile.open(fileobj=packed, mode="w:gz", compresslevel=LEVEL) as archive,
        ):
            for entry in tree.entries:
                info = tarfile.TarInfo(os.fsdecode(entry.path))
                info.type, info.mode = TYPES[entry.kind], entry.mode
                content = tree.content(entry) if entry.kind == FILE else b""
                info.linkname = os.fsdecode(entry.value) if entry.kind == LINK else ""
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    except Changed:
        return False
    return True


@contextlib.contextmanager
def unpacked(path: Path, digest: str, title: str) -> Iterator[Tree]:
    """Yield a directory of this name with the tree of that digest, for as long as it is sent."""
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
    members = contents(path)
    tree = Tree.of(os.fsencode(directory), (entry for entry, _ in members))
    if tree.digest != digest:
        raise CheckFailed(f"{path} is not the code that this run had: it was changed")
    for entry, content in members:
        where = os.path.join(tree.directory, entry.path)
        parent = where if entry.kind == DIRECTORY else os.path.dirname(where)
        os.makedirs(parent, mode=0o700, exist_ok=True)
        if entry.kind == LINK:
            os.symlink(entry.value, where)
        elif entry.kind == FILE:
            with open(where, "xb") as file:
                file.write(content)
                os.fchmod(file.fileno(), entry.mode)
    return tree


def contents(path: Path) -> list[tuple[Entry, bytes]]:
    """Read every member of an archive; no path leads out of the directory, or through a link."""
    members = list[tuple[Entry, bytes]]()
    try:
        with tarfile.open(path, mode="r:gz") as archive:
            for info in archive:
                kind, value, content = KINDS[info.type], b"", b""
                if kind == FILE and (file := archive.extractfile(info)):
                    content = file.read(LARGEST_BYTES)
                    value = hashlib.sha256(content).hexdigest().encode()
                elif kind == LINK:
                    value = os.fsencode(info.linkname)
                name = os.fsencode(info.name)
                members.append((Entry(name, kind, info.mode, len(content), value), content))
        trees.unpacked(trees.packed(entry for entry, _ in members))
    except (OSError, tarfile.TarError, EOFError, KeyError, Nonsense) as error:
        raise CheckFailed(f"{path} cannot be read: {error}") from error
    return members
