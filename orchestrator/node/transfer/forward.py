"""Passes a tree on from node to node: gives what has come, also while the rest is on its way."""

from __future__ import annotations

import io
import os
from typing import BinaryIO

from orchestrator.common import files
from orchestrator.node.transfer.store import Arrivals, Incomplete, Store
from orchestrator.node.transfer.take import Taking
from orchestrator.protocol import manifest as tree
from orchestrator.protocol.manifest import FILE, Entry
from orchestrator.protocol.requests.transfer import TakeTree

LIST = "list"  # the name of the tree's own list


class Given:
    """A tree, of which the list may come first, and contents one by one."""

    def __init__(self, store: Store, digest: str) -> None:
        self.store, self.digest = store, digest
        self.listing = b""
        self.entries: dict[str, Entry] = {}

    def open(self, name: str) -> BinaryIO | None:
        if not self.listing:
            try:
                entries = self.store.tree(self.digest)
            except Incomplete:
                return None
            self.entries = {name_of(entry): entry for entry in entries if entry.kind == FILE}
            self.listing = tree.packed(entries)
        if name == LIST:
            return io.BytesIO(self.listing)
        entry = self.entries[name]
        if not self.store.has(entry):
            return None
        try:
            return files.open_plain(os.fsdecode(self.store.path_of(entry)))
        except OSError:
            return None  # it was thrown away, and comes again

    def wait(self, seconds: float) -> None:
        with self.store.news:
            self.store.news.wait(seconds)


def name_of(entry: Entry) -> str:
    return f"{entry.value.decode('ascii')}-{entry.mode:o}"


def take(store: Store, request: TakeTree) -> Taking:
    """Begin to take what is lacking of a tree from another node."""

    def work(taking: Taking) -> None:
        caller = taking.call(request.giver, request.seconds)
        received = bytearray()
        caller.fetch([(LIST, request.size)], received.extend)
        listing = bytes(received)
        if tree.digest_of(listing) != request.tree:
            raise ValueError("the list of the tree was damaged on its way")
        entries = tree.unpacked(listing)
        store.keep_tree(request.tree, listing)
        lacking = [entries[at] for at in store.lacking(entries)]
        taking.files = len(lacking)
        wanted = [(name_of(entry), entry.size) for entry in lacking]
        taking.receive(caller, wanted, Arrivals(store, lacking))

    return Taking(work)
