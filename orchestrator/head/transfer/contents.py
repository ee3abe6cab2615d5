"""Read and compress contents once for all nodes that lack the same: they come in batches.

A few batches stay in memory. A node that is behind them has its own read and compressed again: that
costs time of this machine, and holds no other node up.
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.head.transfer.tree import Sums, Tree
from orchestrator.protocol.manifest import Entry
from orchestrator.protocol.requests.transfer import Part

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

BATCH_BYTES = 4 << 20  # before compression
AHEAD = 4  # batches that no node has asked for yet
KEPT = 16  # batches in memory
SAMPLE_BYTES = 1 << 16
WORTH_IT = 0.95  # what compresses to more is sent as it is

Starts = Mapping[int, int]  # number of a file -> the offset that it is sent from


class Batch(NamedTuple):
    """Some parts of files, packed, and what could not be read for it."""

    data: bytes  # compressed
    size: int  # before
    contents: int  # bytes of files in it
    problems: Mapping[int, OSError]


def cut(entries: Sequence[Entry], starts: Starts, limit: int) -> Iterator[list[Part]]:
    """Cut files into batches of parts; also an empty file, and one that is there, has a part."""
    parts: list[Part] = []
    room = limit
    for number, start in sorted(starts.items()):
        at, end = start, entries[number].size
        while at < end or at == start:
            size = min(end - at, room)
            parts.append(Part(number, at, size))
            at, room = at + size, room - size
            if not room:
                yield parts
                parts, room = [], limit
            if at >= end:
                break
    if parts:
        yield parts


class Contents:
    """The batches for those nodes that lack the same. Each node takes them at its own pace."""

    def __init__(self, tree: Tree, sums: Sums, starts: Starts, pool: ThreadPoolExecutor) -> None:
        self.tree, self.sums, self.pool = tree, sums, pool
        self.cuts = list(cut(tree.entries, starts, BATCH_BYTES))
        self.size = sum(tree.entries[number].size - start for number, start in starts.items())
        self.lock = threading.Lock()  # of the batches
        self.batches: OrderedDict[int, Future[Batch]] = OrderedDict()
        self.next = 0  # nobody has asked for this one, nor for those after it

    def get(self, number: int) -> Batch | None:
        """Return a batch; None after the last."""
        if number >= len(self.cuts):
            return None
        with self.lock:
            self._begin(number)
            if number >= self.next:
                self.next = number + 1
                for ahead in range(number + 1, min(number + 1 + AHEAD, len(self.cuts))):
                    self._begin(ahead)
            batch = self.batches[number]
            while len(self.batches) > KEPT:
                self.batches.popitem(last=False)
        return batch.result()

    def _begin(self, number: int) -> None:
        if number not in self.batches:
            self.batches[number] = self.pool.submit(self.make, number)
        self.batches.move_to_end(number)

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

    def read(self, part: Part) -> tuple[bytes, str]:
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
