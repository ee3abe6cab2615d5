"""The list of files in a transfer, and its digest, which is the same on all machines.

Paths are bytes: a file's name need not be text. A list of code has no times, so two copies of one
tree have the same digest. Other lists may lack checksums, which are computed during the transfer.
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
# The permission bits, and a time.
NUMBERS = re.compile(rb"([0-7]{1,3})(?: (-?[0-9]{1,20}))?")
FIELDS = 5
MOST_ENTRIES = 4_000_000
LARGEST_LIST_BYTES = 1 << 28  # unpacked
LONGEST_PATH = 4096
# Path components that could leave the directory.
LEADS_OUT = frozenset((b"", b".", b".."))


class ManifestEntry(NamedTuple):
    """One file, symbolic link or directory."""

    # The path below the transferred directory.
    path: bytes
    kind: bytes
    mode: int  # permission bits
    size: int
    # A file's SHA-256 in hexadecimal, if known; a link's target.
    value: bytes
    # The time of the last change in nanoseconds; 0 if copies need not have it.
    time: int = 0


def pack_entries(entries: Iterable[ManifestEntry]) -> bytes:
    """Return the list as bytes: sorted, five fields each, all terminated by zeros."""
    rows = sorted(
        (path, kind, b"%o %d" % (mode, time) if time else b"%o" % mode, b"%d" % size, value)
        for path, kind, mode, size, value, time in entries
    )
    return b"\0".join([*itertools.chain.from_iterable(rows), b""])


def digest_of(listing: bytes) -> str:
    """Return the digest of the packed list, which is its name."""
    return hashlib.sha256(listing).hexdigest()


def unpack_entries(listing: bytes) -> tuple[ManifestEntry, ...]:
    """Return the entries of a received list; raise Nonsense if a path leaves the directory."""
    if len(listing) > LARGEST_LIST_BYTES:
        raise Nonsense(f"a list of {len(listing)} bytes")
    ends = listing.count(b"\0")
    if ends > FIELDS * MOST_ENTRIES or ends % FIELDS or listing[-1:] not in (b"", b"\0"):
        raise Nonsense("not a list of files")
    fields = listing.split(b"\0")[:-1]
    entries = tuple(map(_entry, *(fields[column::FIELDS] for column in range(FIELDS))))
    _refuse_nested(entries)
    return entries


def _entry(path: bytes, kind: bytes, numbers: bytes, size: bytes, value: bytes) -> ManifestEntry:
    sound = bool(value) == (kind == LINK) and kind in (LINK, DIRECTORY)
    if kind == FILE:
        sound = not value or HEXADECIMAL.fullmatch(value) is not None
    known = NUMBERS.fullmatch(numbers)
    if known is None or not (sound and size.isdigit() and len(size) < 16):
        raise Nonsense(f"not an entry of a list of files: {path[:60]!r}")
    if not is_inside(path):
        raise Nonsense(f"a path that leads out of the directory: {path[:60]!r}")
    return ManifestEntry(path, kind, int(known[1], 8), int(size), value, int(known[2] or 0))


def is_inside(path: bytes) -> bool:
    """Return True if a path stays below the directory that it is joined to."""
    return len(path) <= LONGEST_PATH and LEADS_OUT.isdisjoint(path.split(b"/"))


def link_is_inside(path: str, target: str) -> bool:
    """Return True if a link at a path stays below the directory that the path is joined to.

    Its target may go up as many directories as the link is deep, and then only down: after a
    component that may be a link itself, ".." would lead to the parent of that link's target.
    """
    if not target or target.startswith("/") or "\0" in target:
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    down = list(itertools.dropwhile("..".__eq__, parts))
    return ".." not in down and len(parts) - len(down) <= path.count("/")


def _refuse_nested(entries: tuple[ManifestEntry, ...]) -> None:
    """Refuse a path twice, and one below a file or a link: nothing is written through a link."""
    kinds = {entry.path: entry.kind for entry in entries}
    if len(kinds) != len(entries):
        raise Nonsense("a list with one path twice")
    seen: set[bytes] = set()
    for path in kinds:
        parent = path.rpartition(b"/")[0]
        while parent and parent not in seen:
            if kinds.get(parent, DIRECTORY) != DIRECTORY:
                raise Nonsense(f"a path below a file: {path[:60]!r}")
            seen.add(parent)
            parent = parent.rpartition(b"/")[0]
