"""Bring files to one node: offer their list, and send what it lacks."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.common.errors import NodeError
from orchestrator.head.connect.channel import Declined
from orchestrator.head.transfer.contents import Batch, Contents, Starts
from orchestrator.head.transfer.peer import Peer
from orchestrator.head.transfer.tree import Sums, Tree
from orchestrator.protocol.manifest import FILE, difference, digest_of, numbers_in
from orchestrator.protocol.message import Nonsense
from orchestrator.protocol.requests import transfer
from orchestrator.protocol.requests.request import LACKING
from orchestrator.protocol.requests.transfer import Begun, Lacking, Offer, Place, Taken

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

log = logging.getLogger(__name__)

PUT_SECONDS = 60.0  # for a piece to go
COMPARE_SECONDS = 3600.0  # a node may have to read terabytes
WRITE_SECONDS = 300.0  # a node's slow disk
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

    def after(self, other: Sent) -> Sent:
        """Return the sum of this and of what was sent before."""
        failed = {**other.failed, **self.failed}
        return Sent([*other.sent, *self.sent], other.size + self.size, failed)


class Outbox:
    """Holds what several nodes are sent: those that lack the same share its batches."""

    def __init__(self, tree: Tree, before: bytes = b"", sums: Sums | None = None) -> None:
        """Hold a tree; `before` is the list that the stores of the nodes may have already."""
        self.tree, self.sums = tree, sums or Sums(tree)
        self.packed = zlib.compress(tree.listing, 1)
        self.before, self.change = "", b""
        with contextlib.suppress(Nonsense):  # the list of another version
            self.change = zlib.compress(difference(before, tree.listing), 1) if before else b""
            self.before = digest_of(before) if before else ""
        self.lock = threading.Lock()  # of the contents
        self.contents: dict[tuple[tuple[int, int], ...], Contents] = {}
        self.pool: ThreadPoolExecutor | None = None

    @property
    def list_bytes(self) -> int:
        """Return how much of the list goes to a node that has the one before, if there is one."""
        return len(self.change or self.packed)

    def contents_from(self, starts: Starts) -> Contents:
        from concurrent.futures import ThreadPoolExecutor  # brings logging: 5 ms

        key = tuple(sorted(starts.items()))
        with self.lock:
            if self.pool is None:  # zlib lets other threads run
                self.pool = ThreadPoolExecutor(os.cpu_count() or 1)
            if key not in self.contents:
                self.contents[key] = Contents(self.tree, self.sums, starts, self.pool)
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
        self.lacking: Lacking | None = None
        self.lacked: set[int] | None = None  # when it was first heard of
        self.settled: set[int] = set()  # files that only get another time there
        self.unread: set[bytes] = set()  # paths that could not be read, so that none has them
        self.result = Sent()

    def go(self) -> Sent:
        """Offer the files, unless that was done, and send what is lacking."""
        return self.deliver(self.lacking or self.offer())

    def offer(self, *, dry_run: bool = False, seconds: float = COMPARE_SECONDS) -> Lacking:
        """Send the list, and hear what is lacking, which is checked."""
        entries = self.outbox.tree.entries
        lacking = self.offer_change(dry_run=dry_run, seconds=seconds)
        if lacking is None:
            self.peer.open.put(self.outbox.packed, PUT_SECONDS)
            lacking = self.peer.open.ask(Offer(into=self.into, dry_run=dry_run), seconds)
        try:
            numbers = list(numbers_in(lacking.ranges, len(entries)))
        except Nonsense:
            raise NodeError("it lacks files that the list does not have") from None
        known = {begun.number for begun in lacking.begun} <= set(numbers)
        if not known or not all(0 <= number < len(entries) for number in lacking.failed):
            raise NodeError("it lacks files that the list does not have")
        self.result.failed.update(
            {entries[at].path: reason for at, reason in lacking.failed.items()}
        )
        self.lacking = lacking
        self.lacked = set(numbers) if self.lacked is None else self.lacked
        return lacking

    def offer_change(self, *, dry_run: bool, seconds: float) -> Lacking | None:
        """Send what is other in the list; None where the node has not the one before."""
        if not self.outbox.before:
            return None
        before, after = self.outbox.before, self.outbox.tree.digest
        offer = Offer(into=self.into, dry_run=dry_run, before=before, after=after)
        self.peer.open.put(self.outbox.change, PUT_SECONDS)
        try:
            return self.peer.open.ask(offer, seconds)
        except Declined as error:
            if error.kind != LACKING:
                raise
            return None

    def took(self, taken: Taken) -> None:
        """Note what has come to the node from another one."""
        entries = self.outbox.tree.entries
        self.lacking = None  # what it still lacks has to be heard anew
        self.result.size += taken.size
        if taken.lacking is not None:
            if self.lacked is None:
                self.lacked = set(numbers_in(taken.lacking.ranges, len(entries)))
            if not taken.problem:
                failed = taken.lacking.failed.items()
                self.result.failed.update({entries[at].path: reason for at, reason in failed})
                self.count()

    def numbers(self) -> list[int]:
        """Return the numbers of what the node lacks."""
        ranges = self.lacking.ranges if self.lacking else ()
        return list(numbers_in(ranges, len(self.outbox.tree.entries)))

    @property
    def size(self) -> int:
        """Return how many bytes the node lacks."""
        there = sum(half.have for half in self.lacking.begun) if self.lacking else 0
        return sum(self.outbox.tree.entries[at].size for at in self.numbers()) - there

    def deliver(self, lacking: Lacking) -> Sent:
        """Send what the node lacks, batch after batch."""
        starts = self.starts(lacking)
        log.debug("%s: lacks %d files, %d bytes", self.peer.name, len(self.numbers()), self.size)
        contents = self.outbox.contents_from(starts) if starts else None
        window: list[tuple[int, transfer.Contents]] = []
        number = 0
        while contents is not None and (batch := contents.get(number)) is not None:
            number += 1
            self.note(batch)
            self.peer.open.put(batch.data, PUT_SECONDS)
            request = transfer.Contents(size=batch.size, last=number == len(contents.cuts))
            window.append((self.peer.open.post(request), request))
            if len(window) > AHEAD:
                self.hear(window)
            self.result.size += batch.contents
            self.seen(batch.contents)
        while window:
            self.hear(window)
        self.count()
        return self.result

    def count(self) -> None:
        """Note which files the node has now that it lacked."""
        entries = self.outbox.tree.entries
        came = (entries[at] for at in sorted((self.lacked or set()) - self.settled))
        paths = (entry.path for entry in came if entry.kind == FILE)
        self.result.sent = [path for path in paths if path not in self.result.failed]

    def note(self, batch: Batch) -> None:
        """Note what could not be read for a batch."""
        for at, error in batch.problems.items():
            path = self.outbox.tree.entries[at].path
            self.result.failed[path] = error.strerror or str(error)
            self.unread.add(path)

    def hear(self, window: list[tuple[int, transfer.Contents]]) -> None:
        """Wait for the answer to the oldest batch."""
        answer = self.peer.open.wait_for(*window.pop(0), WRITE_SECONDS)
        for at, reason in answer.failed.items():
            if 0 <= at < len(self.outbox.tree.entries):
                self.result.failed.setdefault(self.outbox.tree.entries[at].path, reason)

    def starts(self, lacking: Lacking) -> dict[int, int]:
        """Return from where on each file is to be sent, by what the node has of it."""
        entries = self.outbox.tree.entries
        begun = {half.number: half for half in lacking.begun}
        starts = {}
        for at in self.numbers():
            if entries[at].kind != FILE:
                continue
            starts[at] = 0
            if at in begun:
                try:
                    starts[at] = self.common(begun[at])
                except OSError as error:
                    self.result.failed[entries[at].path] = error.strerror or str(error)
                    del starts[at]
                else:
                    if begun[at].whole and starts[at] == entries[at].size:
                        self.settled.add(at)
        return starts

    def common(self, begun: Begun) -> int:
        """Return how many bytes the node has of a file as it is here."""
        tree = self.outbox.tree
        entry = tree.entries[begun.number]
        if begun.have > entry.size:
            return 0
        whole = begun.have == entry.size
        total = self.outbox.sums.of(entry) if whole else tree.sum(entry, begun.have)
        return begun.have if total == begun.sum else 0
