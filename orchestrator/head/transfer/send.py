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

from orchestrator.common.errors import NodeError
from orchestrator.head.transfer.peer import Peer
from orchestrator.head.transfer.tree import Tree
from orchestrator.protocol.manifest import FILE, Entry, numbers_in
from orchestrator.protocol.message import Nonsense
from orchestrator.protocol.requests import transfer
from orchestrator.protocol.requests.transfer import FilePart, Offer, Place
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


class Batch(NamedTuple):
    """Some parts of files, packed, and what could not be read for it."""

    data: bytes  # compressed
    size: int  # before
    contents: int  # bytes of files in it
    failed: Mapping[int, str]


def cut(entries: Sequence[Entry], numbers: Sequence[int], limit: int) -> Iterator[list[FilePart]]:
    """Cut files into batches of parts; also an empty file has a part."""
    parts: list[FilePart] = []
    room = limit
    for number in numbers:
        at, end = 0, entries[number].size
        while at < end or at == 0:
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

    def __init__(self, tree: Tree, numbers: Sequence[int], pool: ThreadPoolExecutor) -> None:
        self.tree = tree
        self.cuts = list(cut(tree.entries, numbers, BATCH_BYTES))
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
        pieces, failed, count = list[bytes](), dict[int, str](), 0
        for part in self.cuts[number]:
            try:
                data = self.tree.read(self.tree.entries[part.number], part.offset, part.size)
            except OSError as error:
                failed[part.number] = error.strerror or str(error)
                continue
            pieces += (part.packed(), data)
            count += len(data)
        raw = b"".join(pieces)
        sample = raw[:SAMPLE_BYTES]
        level = 1 if len(zlib.compress(sample, 1)) < WORTH_IT * len(sample) else 0
        return Batch(zlib.compress(raw, level), len(raw), count, failed)


@dataclass
class Sent:
    """Tells what one node lacked, and what has become of it."""

    sent: list[bytes] = field(default_factory=list)  # paths
    size: int = 0  # bytes that went there
    failed: dict[bytes, str] = field(default_factory=dict)  # path -> why

    @property
    def files(self) -> int:
        return len(self.sent)


class Outbox:
    """Holds what several nodes are sent: those that lack the same share its batches."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.packed = zlib.compress(tree.listing, 1)
        self.lock = threading.Lock()  # of the contents
        self.contents: dict[tuple[int, ...], SharedBatches] = {}
        self.pool = ThreadPoolExecutor(os.cpu_count() or 1)  # zlib lets other threads run

    def batches(self, numbers: Sequence[int]) -> SharedBatches:
        key = tuple(numbers)
        with self.lock:
            if key not in self.contents:
                self.contents[key] = SharedBatches(self.tree, numbers, self.pool)
            return self.contents[key]

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


class Sender:
    """The way of the files from here to one node."""

    def __init__(
        self, outbox: Outbox, peer: Peer, into: Place, seen: Seen = lambda _: None
    ) -> None:
        self.outbox, self.peer, self.into, self.seen = outbox, peer, into, seen
        self.entries = outbox.tree.entries
        # The numbers of the files that the node lacks by its last answer, and lacked at first.
        self.numbers: list[int] | None = None
        self.lacked: list[int] | None = None
        self.result = Sent()

    def offer(self, *, dry_run: bool = False) -> Sender:
        """Send the list, and note the checked answer about what is lacking."""
        self.peer.open.put(self.outbox.packed, FILE_ANSWER_SECONDS)
        lacking = self.peer.ask(Offer(into=self.into, dry_run=dry_run), WORK_ANSWER_SECONDS)
        try:
            self.numbers = list(numbers_in(lacking.ranges, len(self.entries)))
        except Nonsense:
            raise NodeError("it lacks files that the list does not have") from None
        self.note_failed(lacking.failed)
        self.lacked = self.numbers if self.lacked is None else self.lacked
        return self

    def note_failed(self, failed: Mapping[int, str]) -> None:
        """Note why files cannot be on the node, by their numbers; the first reason counts."""
        for number, reason in failed.items():
            if number in range(len(self.entries)):
                self.result.failed.setdefault(self.entries[number].path, reason)

    @property
    def size(self) -> int:
        """Return how many bytes the node lacks."""
        return sum(self.entries[at].size for at in self.numbers or ())

    def count(self, size: int) -> None:
        """Count bytes that have come to the node from here or from another node."""
        self.result.size += size
        self.seen(size)

    def go(self) -> Sent:
        """Send what the node lacks, batch after batch; offer the files first if that is due."""
        if self.numbers is None:
            self.offer()
        numbers = [at for at in self.numbers or () if self.entries[at].kind == FILE]
        log.debug("%s: lacks %d files, %d bytes", self.peer.name, len(numbers), self.size)
        batches = self.outbox.batches(numbers) if numbers else None
        window: deque[tuple[int, transfer.Contents]] = deque()
        number = 0
        while batches is not None and (batch := batches.get(number)) is not None:
            number += 1
            self.note_failed(batch.failed)
            self.peer.open.put(batch.data, FILE_ANSWER_SECONDS)
            request = transfer.Contents(size=batch.size, last=number == len(batches.cuts))
            window.append((self.peer.open.post(request), request))
            if len(window) > ON_THE_WAY:
                self.hear(window)
            self.count(batch.contents)
        while window:
            self.hear(window)
        return self.done()

    def hear(self, window: deque[tuple[int, transfer.Contents]]) -> None:
        """Wait for the answer to the oldest batch."""
        self.note_failed(self.peer.open.wait_for(*window.popleft(), FILES_ANSWER_SECONDS).failed)

    def done(self) -> Sent:
        """Note which files the node has now that it lacked."""
        came = (self.entries[at] for at in self.lacked or ())
        paths = (entry.path for entry in came if entry.kind == FILE)
        self.result.sent = [path for path in paths if path not in self.result.failed]
        return self.result
