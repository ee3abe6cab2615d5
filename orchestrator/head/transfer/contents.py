"""Read and compress contents once for all nodes that lack the same: they come in batches.

A few batches stay in memory. A node that is behind them has its own read and compressed again: that
costs time of this machine, and holds no other node up.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.head.transfer.tree import Tree, TreeSums
from orchestrator.protocol.manifest import Entry
from orchestrator.protocol.requests.transfer import FilePart

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

BATCH_BYTES = 4 << 20  # before compression
AHEAD = 4  # batches that no node has asked for yet
KEPT = 16  # batches in memory: more than AHEAD
SAMPLE_BYTES = 1 << 16
WORTH_IT = 0.95  # what compresses to more is sent as it is

Starts = Mapping[int, int]  # number of a file -> the offset that it is sent from


class Batch(NamedTuple):
    """Some parts of files, packed, and what could not be read for it."""

    data: bytes  # compressed
    size: int  # before
    contents: int  # bytes of files in it
    problems: Mapping[int, OSError]


def cut(entries: Sequence[Entry], starts: Starts, limit: int) -> Iterator[list[FilePart]]:
    """Cut files into batches of parts; also an empty file, and one that is there, has a part."""
    parts: list[FilePart] = []
    room = limit
    for number, start in sorted(starts.items()):
        at, end = start, entries[number].size
        while at < end or at == start:
            size = min(end - at, room)
            parts.append(FilePart(number, at, size))
            at, room = at + size, room - size
            if not room:
                yield parts
                parts, room = [], limit
            if at >= end:
                break
    if parts:
        yield parts


class SharedBatches:
    """The batches for those nodes that lack the same. Each node takes them at its own pace."""

    def __init__(
        self, tree: Tree, sums: TreeSums, starts: Starts, pool: ThreadPoolExecutor
    ) -> None:
        self.tree, self.sums = tree, sums
        self.cuts = list(cut(tree.entries, starts, BATCH_BYTES))
        self.lock = threading.Lock()
        # The newest batches stay in memory, each as a future: another thread may still make it.
        self.begin = lru_cache(KEPT)(lambda number: pool.submit(self.make, number))

    def get(self, number: int) -> Batch | None:
        """Return a batch, and begin to make those behind it; None after the last."""
        with self.lock:
            numbers = range(number, min(number + 1 + AHEAD, len(self.cuts)))
            batches = [self.begin(each) for each in numbers]
        return batches[0].result() if batches else None

    def make(self, number: int) -> Batch:
        """Read and compress one batch."""
        pieces: list[bytes] = []
        problems: dict[int, OSError] = {}
        count = 0
        for part in self.cuts[number]:
            try:
                data, total = self.read(part)
            except OSError as error:
                problems[part.number] = error
                continue
            pieces += (part._replace(sum=total).packed(), data)
            count += len(data)
        raw = b"".join(pieces)
        return Batch(compressed(raw), len(raw), count, problems)

    def read(self, part: FilePart) -> tuple[bytes, str]:
        """Return a part's bytes, and with the last ones the checksum that its entry lacks."""
        entry = self.tree.entries[part.number]
        data = self.tree.read(entry, part.offset, part.size)
        is_last = part.offset + part.size == entry.size
        return data, self.sums.of(entry) if is_last and not entry.value else ""


def compressed(raw: bytes) -> bytes:
    """Compress quickly, or hardly at all where that would be in vain."""
    sample = raw[:SAMPLE_BYTES]
    level = 1 if len(zlib.compress(sample, 1)) < WORTH_IT * len(sample) else 0
    return zlib.compress(raw, level)
