"""Bring the contents of a tree to nodes: to each what it lacks, to all at once.

Knows nothing of launches: afterwards a node's store has the tree, and can make any directory of it.
This is the way to one node; fanout.py takes it to all of them, or to few that pass the tree on.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.common.errors import NodeError
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.transfer.batches import Batches
from orchestrator.head.transfer.code.scan import Tree
from orchestrator.protocol.requests.transfer import Contents, Lacking, OfferTree

PIECE_SECONDS = 60.0
ANSWER_SECONDS = 300.0  # a node's slow disk
AHEAD = 2  # batches that are on their way while the node writes another

Seen = Callable[[int], None]


@dataclass(frozen=True)
class Sent:
    """The contents that a node lacked."""

    files: int
    size: int

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.files + other.files, self.size + other.size)


class Outbox:
    """The batches for all nodes: those that lack the same share theirs."""

    def __init__(self, tree: Tree, seen: Seen) -> None:
        self.tree = tree
        self.seen = seen
        self.lock = threading.Lock()  # batches are made once for all that lack the same
        self.listing = zlib.compress(tree.listing, 1)
        self.batches: dict[tuple[tuple[int, int], ...], Batches] = {}

    def send(self, channel: NodeChannel) -> Sent:
        """Offer the tree to a node, and send it what it lacks."""
        return self.deliver(channel, self.offer(channel))

    def offer(self, channel: NodeChannel) -> Lacking:
        """Send the list of the tree, and hear what is lacking."""
        channel.put(self.listing, PIECE_SECONDS)
        return channel.ask(OfferTree(tree=self.tree.digest), ANSWER_SECONDS)

    def deliver(self, channel: NodeChannel, lacking: Lacking) -> Sent:
        batches = self.batches_for(lacking)
        asked: list[tuple[int, Contents]] = []
        number = 0
        while batch := batches.get(number):
            channel.put(batch.data, PIECE_SECONDS)
            request = Contents(tree=self.tree.digest, size=batch.size)
            asked.append((channel.tell(request), request))
            if len(asked) > AHEAD:
                channel.wait_for(*asked.pop(0), ANSWER_SECONDS)
            self.seen(batch.size)
            number += 1
        for waiting in asked:
            channel.wait_for(*waiting, ANSWER_SECONDS)
        return Sent(len(batches.entries), batches.size)

    def batches_for(self, lacking: Lacking) -> Batches:
        """Return the batches of these files; what a node says is checked."""
        count, last = len(self.tree.entries), -1
        for first, end in lacking.ranges:
            if not last < first <= end < count:
                raise NodeError("it lacks files that the tree does not have")
            last = end
        with self.lock:
            if lacking.ranges not in self.batches:
                positions = [at for a, b in lacking.ranges for at in range(a, b + 1)]
                self.batches[lacking.ranges] = Batches(self.tree, positions)
            return self.batches[lacking.ranges]

    def close(self) -> None:
        for batches in self.batches.values():
            batches.close()
