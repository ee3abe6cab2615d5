"""A node that gives or takes files, over a channel on which one thing is asked at a time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.head.connect.channel import Declined, NodeChannel
from orchestrator.head.connect.reach import Reached
from orchestrator.head.transfer.tree import Gone, Tree
from orchestrator.protocol.manifest import Entry
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.request import Request
from orchestrator.protocol.requests.transfer import PIECE_BYTES, ReadFile
from orchestrator.protocol.timing import FILE_ANSWER_SECONDS

A = TypeVar("A", bound=Message)


@dataclass
class Moved:
    """The files that one node was sent or gave, or why there are none."""

    node: int = 0
    name: str = ""
    into: str = ""
    files: list[str] = field(default_factory=list)
    kept: int = 0  # that were there already
    size: int = 0  # bytes that went or came
    failed: dict[str, str] = field(default_factory=dict)  # path -> why
    left_out: list[str] = field(default_factory=list)
    error: OrchestratorError | None = None


@dataclass(eq=False)
class Peer:
    """One node, and what is known of the ways to it."""

    name: str
    channel: NodeChannel | None = None
    reached: Reached | None = None  # with its facts, where it was probed
    address: str = ""  # where other nodes may reach it
    lock: threading.RLock = field(default_factory=threading.RLock)  # of the channel

    @property
    def open(self) -> NodeChannel:
        assert self.channel is not None
        return self.channel

    @property
    def site(self) -> str | None:
        """Return what the node list says of where it is."""
        return self.reached.node.site if self.reached else None

    def ask(self, request: Request[A], seconds: float) -> A:
        with self.lock:
            return self.open.ask(request, seconds)

    def ask_all(self, requests: Sequence[Request[A]], seconds: float) -> list[A]:
        """Ask several things, all on their way at once: a far node is no slower than its line."""
        with self.lock:
            asked = [(self.open.post(request), request) for request in requests]
            return [self.open.wait_for(number, request, seconds) for number, request in asked]

    def post(self, request: Request[Any]) -> None:
        """Ask something whose answer is not waited for."""
        with self.lock:
            self.open.post(request)


@dataclass(frozen=True)
class NodeTree(Tree):
    """Files that a node has listed, with their checksums; what we send on is read there."""

    peer: Peer = field(default_factory=lambda: Peer(""))
    place: str = ""  # that the node has listed
    below: str = ""  # of that: where the files are

    @classmethod
    def at(cls, peer: Peer, place: str, below: str, entries: Iterable[Entry]) -> NodeTree:
        tree = Tree.of(os.fsencode(os.path.join(place, below)), entries)
        return cls(
            tree.directory, tree.entries, tree.listing, tree.digest,
            peer=peer, place=place, below=below,
        )  # fmt: skip

    def path(self, entry: Entry) -> str:
        return os.path.join(self.below, os.fsdecode(entry.path))

    def read(self, entry: Entry, offset: int, size: int) -> bytes:
        offsets = range(offset, offset + size, PIECE_BYTES)
        path = self.path(entry)
        requests = [ReadFile(place=self.place, path=path, offset=at) for at in offsets]
        with self.named():
            pieces = [piece.data for piece in self.peer.ask_all(requests, FILE_ANSWER_SECONDS)]
        data = b"".join(pieces)[:size]
        if len(data) < size:
            raise Gone(0, "it became shorter while it was sent")
        return data

    def sum(self, entry: Entry, size: int) -> str:
        path = self.path(entry)
        request = ReadFile(place=self.place, path=path, offset=size, size=0, with_sum=True)
        with self.named():
            return self.peer.ask(request, FILE_ANSWER_SECONDS).sum

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Say of which node an error is; one of a single file is as that of a file here."""
        try:
            yield
        except Declined as error:
            raise OSError(0, error.what) from None
        except NodeError as error:
            name = self.peer.name
            raise NodeError(f"{name}: {error.what}", error.fix, names=[name]) from None
