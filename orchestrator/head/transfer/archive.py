"""Store the code of a run in its experiment as code.tar.gz, and restore it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import math
import os
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from orchestrator.common import files
from orchestrator.common.errors import CheckFailed
from orchestrator.common.hosts import join_names
from orchestrator.common.text import format_bytes
from orchestrator.head.transfer.listing import Rules
from orchestrator.head.transfer.scan import Scan, cache_directory
from orchestrator.head.transfer.tree import Tree
from orchestrator.protocol.manifest import DIRECTORY, FILE, LINK, ManifestEntry

NAME = "code.tar.gz"
TYPES = {FILE: tarfile.REGTYPE, LINK: tarfile.SYMTYPE, DIRECTORY: tarfile.DIRTYPE}


def write_archive(tree: Tree, path: Path, most: float = math.inf) -> Tree:
    """Write a tree of at most `most` bytes, and return it; the largest files are left out.

    Write no archive if the files have changed since they were read.
    """
    by_size = sorted(tree.entries, key=lambda entry: entry.size)
    totals = itertools.accumulate(entry.size for entry in by_size)
    kept = [entry for entry, total in zip(by_size, totals, strict=True) if total <= most]
    tree = Tree.of(tree.directory, kept)
    with (
        contextlib.suppress(Changed),
        files.open_replacement(path) as packed,
        tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive,
    ):
        for entry in tree.entries:
            info = tarfile.TarInfo(os.fsdecode(entry.path))
            info.type, info.mode = TYPES[entry.kind], entry.mode
            content = content_of(tree, entry) if entry.kind == FILE else b""
            info.linkname = os.fsdecode(entry.value) if entry.kind == LINK else ""
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return tree


def missing_code(scan: Scan, tree: Tree | None, kept: Tree | None) -> str:
    """Return what the archive lacks of the code that was scanned, "" if it has all."""
    if tree is None or kept is None:
        why = scan.found.exception() if scan.found.done() else "its files were not read in time"
        return f"the code is not kept for rerun: {why}"
    left = sorted(set(tree.entries) - set(kept.entries), key=lambda entry: -entry.size)
    names = [f"{os.fsdecode(entry.path)} has {format_bytes(entry.size)}" for entry in left]
    names += [scan.refused.what.partition(";")[0]] if scan.refused else []
    return f"the code is kept for rerun without large files: {join_names(names)}" if names else ""


class Changed(Exception):
    """A file is not what it was when the tree was read."""


def content_of(tree: Tree, entry: ManifestEntry) -> bytes:
    with contextlib.suppress(OSError):
        content = tree.read(entry, 0, entry.size)
        if hashlib.sha256(content).hexdigest().encode() == entry.value:
            return content
    raise Changed


@contextlib.contextmanager
def unpacked_archive(path: Path, digest: str, title: str) -> Iterator[Path]:
    """Yield a temporary directory named `title` with the unpacked tree of that digest."""
    parent = cache_directory()
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="code-", dir=parent) as place:
        directory = Path(place, title or "root")
        restore_archive(path, digest, directory)
        yield directory


def restore_archive(path: Path, digest: str, directory: Path) -> None:
    """Unpack an archive into a directory; raise CheckFailed if its tree has another digest."""
    try:
        with (
            files.open_plain(path) as packed,
            tarfile.open(fileobj=packed, mode="r:gz") as archive,
        ):
            # Debian 12's Python has no filters yet, and that of 3.14 would change modes.
            archive.extraction_filter = lambda member, _: member
            archive.extractall(directory, members_inside(archive, directory.resolve()))
    except (OSError, tarfile.TarError, EOFError) as error:
        raise CheckFailed(f"{path} cannot be read: {error}") from error
    rules = Rules(everything=True, largest_file=math.inf, largest_tree=math.inf)
    if Scan(os.fsencode(directory), rules).tree().digest != digest:
        raise CheckFailed(f"{path} is not the code that this run had: it was changed")


def members_inside(archive: tarfile.TarFile, directory: Path) -> Iterator[tarfile.TarInfo]:
    """Yield each member; raise before one that would be written outside of the directory."""
    for member in archive:
        if not Path(directory, member.name).resolve().is_relative_to(directory):
            raise OSError(f"{member.name} leads out of it")
        yield member
