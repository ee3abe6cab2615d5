"""Fill tensors with parts that lie elsewhere: on this node, or on others, which send them.

All ranks tell each other which pieces they take from whom. Then they send each other those pieces,
some tensors at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.common.errors import CheckFailed
from orchestrator.engine.ranks.ranks import gather
from orchestrator.engine.saving.pieces import Kept, Piece, Place, Shard, pieces_for

T = TypeVar("T")
AT_ONCE_BYTES = 256 << 20  # of pieces that travel; a tensor that is larger goes alone

# Copies pieces of shards that this rank can open into these tensors.
Read = Callable[[Sequence[Piece], Sequence[Tensor]], None]
Parts = Mapping[str, tuple[Place, Tensor]]  # the tensors to fill, and the place of each


class Mail:
    """Sends bytes between ranks, and keeps what is sent until it is there."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.sent: list[tuple[dist.Work | None, Tensor]] = []

    def send(self, rank: int, message: Tensor | bytes) -> None:
        if isinstance(message, bytes):
            message = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if message.numel():
            self.sent.append((dist.isend(message, rank, self.group), message))

    def receive(self, rank: int, size: int, into: Tensor | None = None) -> Tensor:
        message = torch.empty(size, dtype=torch.uint8) if into is None else into
        if size:
            dist.recv(message, rank, self.group)
        return message

    def receive_bytes(self, rank: int, size: int) -> bytes:
        return self.receive(rank, size).numpy().tobytes()

    def wait(self) -> None:
        for work, _ in self.sent:
            if work is not None:
                work.wait()
        self.sent.clear()


def everyone(what: T, group: dist.ProcessGroup | None) -> list[T]:
    """Give every rank what each has; a process that has joined no others is alone."""
    return gather(what, group) if dist.is_available() and dist.is_initialized() else [what]


def agreed_pieces(
    into: Parts,
    kept: Kept,
    near: Container[Shard],
    shown: str,
    group: dist.ProcessGroup | None,
) -> list[Piece]:
    """Find the pieces; if one rank cannot have all of its own, all of them hear of it."""
    pieces, problem = pieces_for((place for place, _ in into.values()), kept, near)
    if problem := next(filter(None, everyone(problem, group)), ""):
        raise CheckFailed(
            f"{shown} does not fit this model and optimizer: {problem}",
            "resume with the model.* and optimizer.name that it was saved with",
        )
    return pieces


class Exchange:
    """Brings every rank its pieces. All ranks make one, and say who gives each shard to them."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        server: Callable[[Shard], int],
        read: Read,
        rank: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.read, self.rank, self.group = read, rank, group
        sources = [(server(piece.shard), piece) for piece in pieces]
        self.near = [piece for source, piece in sources if source == rank]
        far = [(source, piece) for source, piece in sources if source != rank]
        self.far = everyone(far, group)  # of each rank: who sends it what

    def bring(self, into: Parts) -> None:
        """Fill this rank's parts."""
        self.read(self.near, [part_of(into, piece) for piece in self.near])
        for names in rounds(piece for far in self.far for _, piece in far):
            mail = Mail(self.group)
            for rank in range(len(self.far)):
                if pieces := self._pieces(self.rank, rank, names):
                    parts = [piece.empty() for piece in pieces]
                    self.read(pieces, parts)
                    mail.send(rank, torch.cat([part.flatten().view(torch.uint8) for part in parts]))
            for source in range(len(self.far)):
                if pieces := self._pieces(source, self.rank, names):
                    self._fill(into, source, pieces, mail)
            mail.wait()

    def _fill(self, into: Parts, source: int, pieces: Sequence[Piece], mail: Mail) -> None:
        """Copy the pieces that one rank sends to their places."""
        sizes = [piece.bytes for piece in pieces]
        message = mail.receive(source, sum(sizes))
        for piece, data in zip(pieces, torch.split(message, sizes), strict=True):
            part = piece.empty()  # a slice of the message may begin anywhere
            part.view(-1).view(torch.uint8).copy_(data)
            part_of(into, piece).copy_(part)

    def _pieces(self, source: int, target: int, names: set[str]) -> list[Piece]:
        return [
            piece
            for sender, piece in self.far[target]
            if sender == source and piece.place.name in names
        ]


def part_of(into: Parts, piece: Piece) -> Tensor:
    """Return where a piece goes."""
    place, tensor = into[piece.place.name]
    return piece.box.of(tensor, place)


def rounds(pieces: Iterable[Piece]) -> list[set[str]]:
    """Divide the tensors that travel, alike on all ranks."""
    sizes: dict[str, int] = {}
    for piece in pieces:
        sizes[piece.place.name] = sizes.get(piece.place.name, 0) + piece.bytes
    found: list[set[str]] = []
    room = 0
    for name, size in sorted(sizes.items()):
        if not found or size > room:
            found.append(set())
            room = AT_ONCE_BYTES
        found[-1].add(name)
        room -= size
    return found
