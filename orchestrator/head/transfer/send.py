"""Bring files to nodes: offer their list to each, and send what it lacks in batches.

Contents are read and compressed once for all nodes that lack the same. A few batches stay in
memory. A node that is behind them has its own read and compressed again: that costs time of this
machine, and holds no other node up.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.transfer.tree import Tree
from orchestrator.protocol.manifest import FILE, ManifestEntry, numbers_in
from orchestrator.protocol.message import Nonsense
from orchestrator.protocol.requests.transfer import Contents, FilePart, Offer, RemoteDir
from orchestrator.protocol.timing import (
    FILE_ANSWER_SECONDS,
    FILES_ANSWER_SECONDS,
    WORK_ANSWER_SECONDS,
)

log = logging.getLogger(__name__)

BATCH_BYTES = 4 << 20  # before compression
AHEAD = 4  # batches that no node has asked for yet
KEPT = 16  # batches in memory: more than AHEAD
ON_THE_WAY = 2  # batches that are on their way while the node writes another
SAMPLE_BYTES = 1 << 16
WORTH_IT = 0.95  # what compresses to more is sent as it is

Seen = Callable[[int], None]
# Returns some bytes of a file; an OSError where it has changed since it was listed.
Reader = Callable[[ManifestEntry, int, int], bytes]


class Batch(NamedTuple):
    """Some parts of files, packed, and what could not be read for it."""

    data: bytes  # compressed
    size: int  # before
    contents: int  # bytes of files in it
    failed: Mapping[int, str]


@dataclass
class Sent:
    """What one node lacked, and what has become of it."""

    lacked: list[bytes] = field(default_factory=list)  # paths of files
    size: int = 0  # bytes that went there
    failed: dict[bytes, str] = field(default_factory=dict)  # path -> why

    @property
    def sent(self) -> list[bytes]:
        return [path for path in self.lacked if path not in self.failed]


def send_to_all(
    channels: Sequence[NodeChannel],
    places: Sequence[RemoteDir],
    tree: Tree,
    seen: Seen = lambda _: None,
    *,
    read: Reader | None = None,
    dry_run: bool = False,
) -> list[Sent | OrchestratorError]:
    """Send a tree to nodes; return what each lacked, or its error. `seen` hears of the bytes.

    Files that are not on this machine are read by `read`.
    """
    outbox = Outbox(tree, read or tree.read)
    pairs = list(zip(channels, places, strict=True))
    try:
        return fleet.everywhere(pairs, lambda pair: outbox.send(*pair, seen, dry_run=dry_run))
    finally:
        outbox.pool.shutdown(cancel_futures=True)


def first_failed(results: Sequence[Sent | OrchestratorError]) -> bytes:
    """Return the path of a file that could not come to a node as it was read, or nothing."""
    sent = (result for result in results if isinstance(result, Sent))
    return next((path for result in sent for path in sorted(result.failed)), b"")


class Outbox:
    """Holds what several nodes are sent: those that lack the same share its batches."""

    def __init__(self, tree: Tree, read: Reader) -> None:
        self.tree, self.read = tree, read
        self.packed = zlib.compress(tree.listing, 1)
        self.lock = threading.Lock()  # of the contents
        self.contents: dict[tuple[int, ...], SharedBatches] = {}
        self.pool = ThreadPoolExecutor(os.cpu_count() or 1)  # zlib lets other threads run

    def batches(self, numbers: Sequence[int]) -> SharedBatches:
        key = tuple(numbers)
        with self.lock:
            if key not in self.contents:
                self.contents[key] = SharedBatches(self, numbers)
            return self.contents[key]

    def send(self, channel: NodeChannel, into: RemoteDir, seen: Seen, *, dry_run: bool) -> Sent:
        """Offer the files to one node, and send what it lacks, batch after batch."""
        sent, entries = Sent(), self.tree.entries

        def note_failed(failed: Mapping[int, str]) -> None:
            """Note why files cannot be on the node; the first reason counts."""
            for number, reason in failed.items():
                if number in range(len(entries)):
                    sent.failed.setdefault(entries[number].path, reason)

        def hear() -> None:
            """Wait for the answer to the oldest batch."""
            note_failed(channel.wait_for(*window.popleft(), FILES_ANSWER_SECONDS).failed)

        channel.put(self.packed, FILE_ANSWER_SECONDS)
        lacking = channel.ask(Offer(into=into, dry_run=dry_run), WORK_ANSWER_SECONDS)
        note_failed(lacking.failed)
        try:
            lacked = list(numbers_in(lacking.ranges, len(entries)))
        except Nonsense:
            raise NodeError("it lacks files that the list does not have") from None
        numbers = [number for number in lacked if entries[number].kind == FILE]
        sent.lacked = [entries[number].path for number in numbers]
        log.debug("%s: lacks %d files", channel.name, len(numbers))
        seen(self.tree.size - sum(entries[number].size for number in numbers))
        batches = self.batches(() if dry_run else numbers)
        window: deque[tuple[int, Contents]] = deque()
        for number in range(len(batches.cuts)):
            batch = batches.get(number)
            note_failed(batch.failed)
            channel.put(batch.data, FILE_ANSWER_SECONDS)
            request = Contents(size=batch.size, last=number + 1 == len(batches.cuts))
            window.append((channel.post(request), request))
            if len(window) > ON_THE_WAY:
                hear()
            sent.size += batch.contents
            seen(batch.contents)
        while window:
            hear()
        return sent


class SharedBatches:
    """The batches for those nodes that lack the same. Each node takes them at its own pace."""

    def __init__(self, outbox: Outbox, numbers: Sequence[int]) -> None:
        self.entries, self.read = outbox.tree.entries, outbox.read
        self.cuts = list(cut(self.entries, numbers, BATCH_BYTES))
        self.lock = threading.Lock()
        # The newest batches stay in memory, each as a future: another thread may still make it.
        self.begin = lru_cache(KEPT)(lambda number: outbox.pool.submit(self.make, number))

    def get(self, number: int) -> Batch:
        """Return a batch, and begin to make those behind it."""
        with self.lock:
            numbers = range(number, min(number + 1 + AHEAD, len(self.cuts)))
            batches = [self.begin(each) for each in numbers]
        return batches[0].result()

    def make(self, number: int) -> Batch:
        """Read and compress one batch."""
        pieces, failed, count = list[bytes](), dict[int, str](), 0
        for part in self.cuts[number]:
            try:
                data = self.read(self.entries[part.number], part.offset, part.size)
            except OSError as error:
                failed[part.number] = error.strerror or str(error)
                continue
            pieces += (part.packed(), data)
            count += len(data)
        raw = b"".join(pieces)
        sample = raw[:SAMPLE_BYTES]
        level = 1 if len(zlib.compress(sample, 1)) < WORTH_IT * len(sample) else 0
        return Batch(zlib.compress(raw, level), len(raw), count, failed)


def cut(
    entries: Sequence[ManifestEntry], numbers: Sequence[int], limit: int
) -> Iterator[list[FilePart]]:
    """Cut files into batches of parts; also an empty file has a part."""
    parts: list[FilePart] = []
    room = limit
    for number in numbers:
        for at in _offsets(entries[number].size, room, limit):
            size = min(entries[number].size - at, room)
            parts.append(FilePart(number, at, size))
            room -= size
            if not room:
                yield parts
                parts, room = [], limit
    if parts:
        yield parts


def _offsets(size: int, room: int, limit: int) -> Iterator[int]:
    """Yield where the parts of a file begin: one in the room that is left, then whole ones."""
    yield 0
    yield from range(room, size, limit)
