"""Bring files to one node: offer their list, and send what it lacks."""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.common.errors import NodeError
from orchestrator.head.transfer.contents import SharedBatches, Starts
from orchestrator.head.transfer.peer import Peer
from orchestrator.head.transfer.tree import Tree, TreeSums
from orchestrator.protocol.manifest import FILE, numbers_in
from orchestrator.protocol.message import Nonsense
from orchestrator.protocol.requests import transfer
from orchestrator.protocol.requests.transfer import Lacking, Offer, PartlyThere, Place
from orchestrator.protocol.timing import (
    FILE_ANSWER_SECONDS,
    FILES_ANSWER_SECONDS,
    WORK_ANSWER_SECONDS,
)

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

log = logging.getLogger(__name__)

AHEAD = 2  # batches that are on their way while the node writes another

Seen = Callable[[int], None]


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
        self.tree, self.sums = tree, TreeSums(tree)
        self.packed = zlib.compress(tree.listing, 1)
        self.lock = threading.Lock()  # of the contents
        self.contents: dict[tuple[tuple[int, int], ...], SharedBatches] = {}
        self.pool: ThreadPoolExecutor | None = None

    def contents_from(self, starts: Starts) -> SharedBatches:
        from concurrent.futures import ThreadPoolExecutor  # brings logging: 5 ms

        key = tuple(sorted(starts.items()))
        with self.lock:
            if self.pool is None:  # zlib lets other threads run
                self.pool = ThreadPoolExecutor(os.cpu_count() or 1)
            if key not in self.contents:
                self.contents[key] = SharedBatches(self.tree, self.sums, starts, self.pool)
            return self.contents[key]

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
        self.sums.keep()


class Sender:
    """The way of the files from here to one node."""

    def __init__(
        self, outbox: Outbox, peer: Peer, into: Place, seen: Seen = lambda _: None
    ) -> None:
        self.outbox, self.peer, self.into, self.seen = outbox, peer, into, seen
        self.entries = outbox.tree.entries
        # What the node said to the last offer, and the numbers of the files that it lacks by that.
        self.lacking: Lacking | None = None
        self.numbers: list[int] = []
        # The files that it lacked at first, without those that only get another time there.
        self.lacked = set[int]()
        self.result = Sent()

    def go(self) -> Sent:
        """Offer the files, unless that was done, and send what is lacking."""
        return self.deliver(self.lacking or self.offer())

    def offered(self) -> Sender:
        """Offer the files, and return the sender."""
        self.offer()
        return self

    def offer(self, *, dry_run: bool = False, seconds: float = WORK_ANSWER_SECONDS) -> Lacking:
        """Send the list, and return the checked answer about what is lacking."""
        self.peer.open.put(self.outbox.packed, FILE_ANSWER_SECONDS)
        lacking = self.peer.open.ask(Offer(into=self.into, dry_run=dry_run), seconds)
        try:
            self.numbers = list(numbers_in(lacking.ranges, len(self.entries)))
            if not {begun.number for begun in lacking.begun} <= set(self.numbers):
                raise Nonsense("a file is there in part, and is not lacking")
        except Nonsense:
            raise NodeError("it lacks files that the list does not have") from None
        self.note_failed(lacking.failed)
        self.lacking = lacking
        self.lacked = self.lacked or set(self.numbers)
        return lacking

    def note_failed(self, failed: Mapping[int, str]) -> None:
        """Note why files cannot be on the node, by their numbers; the first reason counts."""
        for number, reason in failed.items():
            if number in range(len(self.entries)):
                self.result.failed.setdefault(self.entries[number].path, reason)

    @property
    def size(self) -> int:
        """Return how many bytes the node lacks."""
        there = sum(half.have for half in self.lacking.begun) if self.lacking else 0
        return sum(self.entries[at].size for at in self.numbers) - there

    def count_taken(self, size: int) -> None:
        """Count bytes that have come to the node from here or from another node."""
        self.result.size += size
        self.seen(size)

    def end_taking(self, problem: str) -> None:
        """Note that the node has taken all from another one, or that it has to be offered again."""
        self.lacking = None
        if not problem:
            self.count()

    def deliver(self, lacking: Lacking) -> Sent:
        """Send what the node lacks, batch after batch."""
        starts = self.starts(lacking)
        log.debug("%s: lacks %d files, %d bytes", self.peer.name, len(self.numbers), self.size)
        contents = self.outbox.contents_from(starts) if starts else None
        window: deque[tuple[int, transfer.Contents]] = deque()
        number = 0
        while contents is not None and (batch := contents.get(number)) is not None:
            number += 1
            self.note_failed({at: reason_of(error) for at, error in batch.problems.items()})
            self.peer.open.put(batch.data, FILE_ANSWER_SECONDS)
            request = transfer.Contents(size=batch.size, last=number == len(contents.cuts))
            window.append((self.peer.open.post(request), request))
            if len(window) > AHEAD:
                self.hear(window)
            self.count_taken(batch.contents)
        while window:
            self.hear(window)
        self.count()
        return self.result

    def hear(self, window: deque[tuple[int, transfer.Contents]]) -> None:
        """Wait for the answer to the oldest batch."""
        self.note_failed(self.peer.open.wait_for(*window.popleft(), FILES_ANSWER_SECONDS).failed)

    def count(self) -> None:
        """Note which files the node has now that it lacked."""
        came = (self.entries[at] for at in sorted(self.lacked))
        paths = (entry.path for entry in came if entry.kind == FILE)
        self.result.sent = [path for path in paths if path not in self.result.failed]

    def starts(self, lacking: Lacking) -> dict[int, int]:
        """Return from where on each file is to be sent, by what the node has of it."""
        begun = {half.number: half for half in lacking.begun}
        starts = {at: 0 for at in self.numbers if self.entries[at].kind == FILE}
        for at in starts.keys() & begun.keys():
            try:
                starts[at] = self.common(begun[at])
            except OSError as error:
                self.note_failed({at: reason_of(error)})
                del starts[at]
                continue
            if begun[at].whole and starts[at] == self.entries[at].size:
                self.lacked.discard(at)
        return starts

    def common(self, begun: PartlyThere) -> int:
        """Return how many bytes the node has of a file as it is here."""
        tree, entry = self.outbox.tree, self.entries[begun.number]
        if begun.have > entry.size:
            return 0
        whole = begun.have == entry.size
        total = self.outbox.sums.of(entry) if whole else tree.sum(entry, begun.have)
        return begun.have if total == begun.sum else 0


def reason_of(error: OSError) -> str:
    return error.strerror or str(error)
