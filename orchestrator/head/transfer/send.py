"""Send files to nodes: offer the manifest to each, and send missing files in batches.

Contents are read and compressed once for all nodes that lack the same files. A few batches stay in
memory. For a slower node older batches are read and compressed again: that costs time on this
machine, but delays no other node.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.transfer.tree import Moved, Tree
from orchestrator.protocol.manifest import FILE, ManifestEntry
from orchestrator.protocol.requests.transfer import Contents, FilePart, Offer, RemoteDir
from orchestrator.protocol.timing import (
    FILE_ANSWER_SECONDS,
    FILES_ANSWER_SECONDS,
    WORK_ANSWER_SECONDS,
)

log = logging.getLogger(__name__)

# The size of a batch before compression.
BATCH_BYTES = 4 << 20
# The number of batches that are prepared before a node needs them.
AHEAD = 4
# The number of batches in memory, which has to be more than AHEAD.
KEPT = 16
# The number of batches in transit while the node writes another.
ON_THE_WAY = 2
SAMPLE_BYTES = 1 << 16
# Data that does not compress below this ratio is sent uncompressed.
WORTH_IT = 0.95

Seen = Callable[[int], None]
# A reader returns some bytes of a file; it raises OSError if the file has changed.
Reader = Callable[[ManifestEntry, int, int], bytes]


class Batch(NamedTuple):
    """A compressed batch of file parts, and the errors of files that could not be read."""

    data: bytes
    # The size before compression.
    size: int
    # The bytes of files, without the parts' headers.
    contents: int
    failed: Mapping[int, str]


def send_to_all(
    channels: Sequence[NodeChannel],
    places: Sequence[RemoteDir],
    tree: Tree,
    seen: Seen = lambda _: None,
    *,
    read: Reader | None = None,
    dry_run: bool = False,
) -> list[Moved | OrchestratorError]:
    """Send a tree to nodes; return each node's result or error, in their order.

    `seen` is called with the number of bytes of each step, for a progress bar. `read` replaces
    reading the files from this machine's disk.
    """
    outbox = Outbox(tree, read or tree.read)
    pairs = list(zip(channels, places, strict=True))
    try:
        return fleet.map_parallel(pairs, lambda pair: outbox.send(*pair, seen, dry_run=dry_run))
    finally:
        outbox.pool.shutdown(cancel_futures=True)


def first_failed_path(results: Sequence[Moved | OrchestratorError]) -> str:
    """Return the path of a file that could not be sent as it was read, else ""."""
    sent = (result for result in results if isinstance(result, Moved))
    return next((path for result in sent for path in sorted(result.failed)), "")


class Outbox:
    """The files for several nodes; nodes that lack the same files share batches.

    Each node takes them at its own pace.
    """

    def __init__(self, tree: Tree, read: Reader) -> None:
        self.tree, self.read = tree, read
        self.packed = zlib.compress(tree.listing, 1)
        self.lock = threading.Lock()
        # Threads suffice for compression, as zlib releases the GIL.
        self.pool = ThreadPoolExecutor(os.cpu_count() or 1)
        # The newest batches stay in memory as futures, as another thread may still prepare them.
        self.begin = lru_cache(KEPT)(lambda parts: self.pool.submit(self.make, parts))

    def batches(self, numbers: Sequence[int]) -> Iterator[Batch]:
        """Yield the batches of these files as they are ready; the next ones are prepared."""
        cuts = list(cut_batches(self.tree.entries, numbers, BATCH_BYTES))
        for number in range(len(cuts)):
            with self.lock:
                batches = [self.begin(parts) for parts in cuts[number : number + 1 + AHEAD]]
            yield batches[0].result()

    def make(self, parts: Sequence[FilePart]) -> Batch:
        """Read and compress one batch."""
        pieces, failed, count = list[bytes](), dict[int, str](), 0
        for part in parts:
            try:
                data = self.read(self.tree.entries[part.number], part.offset, part.size)
            except OSError as error:
                failed[part.number] = error.strerror or str(error)
                continue
            pieces += (part.packed(), data)
            count += len(data)
        raw = b"".join(pieces)
        sample = raw[:SAMPLE_BYTES]
        level = 1 if len(zlib.compress(sample, 1)) < WORTH_IT * len(sample) else 0
        return Batch(zlib.compress(raw, level), len(raw), count, failed)

    def send(self, channel: NodeChannel, into: RemoteDir, seen: Seen, *, dry_run: bool) -> Moved:
        """Offer the files to one node, and send those it lacks, batch after batch."""
        sent, entries = Moved(into=into.directory), self.tree.entries

        def note_failed(failed: Mapping[int, str]) -> None:
            """Store why files cannot be written on the node; the first reason counts."""
            for number, reason in failed.items():
                if number in range(len(entries)):
                    sent.failed.setdefault(os.fsdecode(entries[number].path), reason)

        def hear(most: int) -> None:
            """Wait for the oldest answers until at most that many are pending."""
            while len(window) > most:
                note_failed(channel.wait_for(*window.popleft(), FILES_ANSWER_SECONDS).failed)

        channel.put(self.packed, FILE_ANSWER_SECONDS)
        lacking = channel.ask(Offer(into=into, dry_run=dry_run), WORK_ANSWER_SECONDS)
        note_failed(lacking.failed)
        if max(lacking.numbers, default=-1) >= len(entries):
            raise NodeError("it lacks files that the list does not have")
        # Each once, in the order of the list: a node may name them in any order, or twice.
        numbers = [number for number in sorted({*lacking.numbers}) if entries[number].kind == FILE]
        log.debug("%s: lacks %d files", channel.name, len(numbers))
        seen(self.tree.size - sum(entries[number].size for number in numbers))
        window: deque[tuple[int, Contents]] = deque()
        for batch in self.batches(() if dry_run else numbers):
            note_failed(batch.failed)
            channel.put(batch.data, FILE_ANSWER_SECONDS)
            request = Contents(size=batch.size)
            window.append((channel.post(request), request))
            hear(ON_THE_WAY)
            sent.size += batch.contents
            seen(batch.contents)
        hear(0)
        came = (os.fsdecode(entries[number].path) for number in numbers)
        sent.files = [path for path in came if path not in sent.failed]
        paths = {os.fsdecode(entry.path) for entry in entries if entry.kind == FILE}
        sent.kept = len(paths.difference(sent.files, sent.failed))
        return sent


def cut_batches(
    entries: Sequence[ManifestEntry], numbers: Sequence[int], limit: int
) -> Iterator[tuple[FilePart, ...]]:
    """Yield batches of file parts, each at most `limit` bytes; an empty file has one part."""
    parts: list[FilePart] = []
    room = limit
    for number in numbers:
        for at in range(0, max(entries[number].size, 1), limit):
            size = min(entries[number].size - at, limit)
            if size > room:
                yield tuple(parts)
                parts, room = [], limit
            parts.append(FilePart(number, at, size))
            room -= size
    if parts:
        yield tuple(parts)
