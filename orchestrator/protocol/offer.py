"""The list of files that a head offers to a node: names, sizes and times, without contents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from orchestrator.protocol.manifest import DIRECTORY, FILE, LINK, is_inside
from orchestrator.protocol.message import Nonsense

LARGEST = 1 << 28  # bytes


class Offered(NamedTuple):
    """One file, link or directory."""

    path: bytes
    kind: bytes
    mode: int
    size: int
    changed: int  # nanoseconds
    target: bytes = b""  # of a link


def packed(files: Iterable[Offered]) -> bytes:
    fields: list[bytes] = []
    for file in files:
        numbers = b"%d %d %d" % (file.mode, file.size, file.changed)
        fields += (file.path, file.kind, numbers, file.target)
    return b"\0".join([*fields, b""])


def unpacked(data: bytes) -> list[Offered]:
    """Read an offer; Nonsense where a name would lead out of the directory."""
    fields = data.split(b"\0")
    if fields.pop() or len(fields) % 4:
        raise Nonsense("no offer of files")
    files = []
    for path, kind, numbers, target in zip(*(fields[i::4] for i in range(4))):  # noqa: B905  3.9
        if not is_inside(path) or kind not in (FILE, LINK, DIRECTORY):
            raise Nonsense(f"a file that cannot be taken: {path[:60]!r}")
        try:
            mode, size, changed = map(int, numbers.split())
        except ValueError:
            raise Nonsense(f"no numbers of a file: {numbers[:60]!r}") from None
        files.append(Offered(path, kind, mode, size, changed, target))
    return files
