"""The list of what a tree of files holds, and the digest that names it, the same on all machines.

Paths are bytes: a file's name need not be text. The list holds contents by their SHA-256, kinds and
permission bits, and no times, so two copies of one tree have one digest.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple

from orchestrator.protocol.message import Nonsense

FILE, LINK, DIRECTORY = b"f", b"l", b"d"
HEXADECIMAL = re.compile(rb"[0-9a-f]{64}")
MODE = re.compile(rb"[0-7]{1,3}")
MOST_ENTRIES = 1_000_000
LARGEST_LIST = 1 << 28  # bytes, unpacked
LONGEST_PATH = 4096
LEADS_OUT = frozenset((b"", b".", b".."))  # parts of a path that could


class Entry(NamedTuple):
    """One file, symbolic link or empty directory."""

    path: bytes  # below the tree's directory
    kind: bytes
    mode: int  # permission bits
    size: int
    value: bytes  # a file's SHA-256 in hexadecimal, or what a link leads to


def packed(entries: Iterable[Entry]) -> bytes:
    """Return the list as bytes: sorted, five fields each, which zeros end."""
    fields: list[bytes] = []
    for entry in sorted(entries):
        fields += (entry.path, entry.kind, b"%o" % entry.mode, b"%d" % entry.size, entry.value)
    fields.append(b"")
    return b"\0".join(fields)


def digest_of(listing: bytes) -> str:
    """Return the name of the tree whose packed list this is."""
    return hashlib.sha256(listing).hexdigest()


def unpacked(listing: bytes) -> tuple[Entry, ...]:
    """Read a list from another machine; Nonsense where a path would lead out of the tree."""
    if len(listing) > LARGEST_LIST:
        raise Nonsense(f"a list of {len(listing)} bytes")
    fields = listing.split(b"\0")
    if fields.pop() or len(fields) % 5 or len(fields) > 5 * MOST_ENTRIES:
        raise Nonsense("no list of a tree")
    rows = zip(*(fields[column::5] for column in range(5)))  # noqa: B905  3.9 has no strict=
    entries = tuple(_entry(*row) for row in rows)
    _refuse_nested(entries)
    return entries


def _entry(path: bytes, kind: bytes, mode: bytes, size: bytes, value: bytes) -> Entry:
    sound = bool(value) == (kind == LINK) and kind in (LINK, DIRECTORY)
    if kind == FILE:
        sound = HEXADECIMAL.fullmatch(value) is not None
    if not (sound and MODE.fullmatch(mode) and size.isdigit() and len(size) < 16):
        raise Nonsense(f"no entry of a tree: {path[:60]!r}")
    if not is_inside(path):
        raise Nonsense(f"a path that leads out of the tree: {path[:60]!r}")
    return Entry(path, kind, int(mode, 8), int(size), value)


def is_inside(path: bytes) -> bool:
    """Tell whether a path stays below the directory that it is joined to."""
    return len(path) <= LONGEST_PATH and LEADS_OUT.isdisjoint(path.split(b"/"))


def link_is_inside(path: str, target: str) -> bool:
    """Tell whether a link at a path stays below the directory that the path is joined to.

    Its target may go up as many directories as the link is deep, and then only down: after a
    part that may be a link itself, ".." would lead wherever that one leads.
    """
    if not target or target.startswith("/") or "\0" in target:
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    down = list(itertools.dropwhile("..".__eq__, parts))
    return ".." not in down and len(parts) - len(down) <= path.count("/")


def _refuse_nested(entries: tuple[Entry, ...]) -> None:
    """Refuse a path twice, and one below a file or a link: nothing is written through a link."""
    kinds = {entry.path: entry.kind for entry in entries}
    if len(kinds) != len(entries):
        raise Nonsense("a tree with one path twice")
    seen: set[bytes] = set()
    for path in kinds:
        parent = path.rpartition(b"/")[0]
        while parent and parent not in seen:
            if kinds.get(parent, DIRECTORY) != DIRECTORY:
                raise Nonsense(f"a path below a file: {path[:60]!r}")
            seen.add(parent)
            parent = parent.rpartition(b"/")[0]
