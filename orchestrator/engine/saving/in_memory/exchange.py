"""Put a rank's part of each tensor together from the parts that ranks of another layout kept.

What each rank needs from which shard is worked out first, without touching a tensor. Then all ranks
send each other those pieces, some tensors at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.engine.ranks.ranks import gather
from orchestrator.engine.saving.in_memory.memory_file import DTYPES, Place

AT_ONCE_BYTES = 256 << 20  # bytes of whole tensors; one that is larger goes alone


@dataclass(frozen=True)
class Box:
    """The place of a part in its tensor: the start and the length in each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def common(self, other: Box) -> Box:
        """Return what both have; its size may be 0."""
        start = tuple(map(max, self.start, other.start))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )
        return Box(start, tuple(max(0, end - a) for a, end in zip(start, ends, strict=True)))

    def of(self, part: Tensor, box: Box) -> Tensor:
        """Return the part's own part, where the first part lies in `box`."""
        for dim, (at, length) in enumerate(zip(self.start, self.shape, strict=True)):
            part = part.narrow(dim, at - box.start[dim], length)
        return part


@dataclass(frozen=True)
class Piece:
    """Name what one rank takes of a tensor from one shard."""

    name: str
    shard: int
    box: Box


def box_of(place: Place) -> Box:
    return Box(place.start, place.shape)


def pieces_for(
    wanted: Sequence[Place], kept: Mapping[int, Sequence[Place]], near: set[int]
) -> tuple[list[Piece], str]:
    """Choose from which shards to take the parts that are wanted, near ones first; or say which
    tensor cannot be put together."""
    by_name: dict[str, list[tuple[int, Place]]] = {}
    for shard in sorted(kept, key=lambda shard: (shard not in near, shard)):
        for place in kept[shard]:
            by_name.setdefault(place.name, []).append((shard, place))
    pieces: list[Piece] = []
    for own in wanted:
        there = by_name.pop(own.name, [])
        if any((place.whole, place.dtype) != (own.whole, own.dtype) for _, place in there):
            return [], f"{own.name} was another tensor"
        lacking, used = box_of(own).size, set()
        for shard, place in there:
            box = box_of(place)
            common = box.common(box_of(own))
            if box not in used and common.size:  # several shards may hold the same
                used.add(box)
                pieces.append(Piece(own.name, shard, common))
                lacking -= common.size
        if lacking or not there:
            return [], f"not all of {own.name} is there"
    return pieces, next((f"{name} is not in this model" for name in by_name), "")


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


class Exchange:
    """Brings every rank its pieces. All ranks make one, with what each is given of its own."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        server: Callable[[int, int], int],  # the rank that gives a shard to a rank
        opened: Callable[[int], Mapping[str, tuple[Place, Tensor]]],  # a shard that this rank gives
        rank: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.server, self.opened, self.rank, self.group = server, opened, rank, group
        self.wanted = gather(list(pieces), group) if group is not None else [list(pieces)]

    def bring(self, targets: Mapping[str, Place]) -> dict[str, Tensor]:
        """Return this rank's parts, in host memory."""
        parts = {name: empty(place) for name, place in targets.items()}
        for names in rounds(targets):
            mail = Mail(self.group)
            for rank in range(len(self.wanted)):
                if rank != self.rank and (asked := self._pieces(self.rank, rank, names)):
                    mail.send(rank, torch.cat([self._bytes_of(piece) for piece in asked]))
            for source in range(len(self.wanted)):
                self._fill(parts, targets, source, self._pieces(source, self.rank, names), mail)
            mail.wait()
        return parts

    def _fill(
        self,
        parts: Mapping[str, Tensor],
        targets: Mapping[str, Place],
        source: int,
        pieces: Sequence[Piece],
        mail: Mail,
    ) -> None:
        """Copy the pieces of one rank to their places."""
        into = [piece.box.of(parts[piece.name], box_of(targets[piece.name])) for piece in pieces]
        if source == self.rank:
            for part, piece in zip(into, pieces, strict=True):
                part.copy_(self._part(piece))
            return
        sizes = [part.numel() * part.element_size() for part in into]
        message = mail.receive(source, sum(sizes))
        for part, data in zip(into, torch.split(message, sizes), strict=True):
            part.copy_(data.clone().view(part.dtype).view(part.shape))  # aligned again

    def _pieces(self, source: int, target: int, names: set[str]) -> list[Piece]:
        return [
            piece
            for piece in self.wanted[target]
            if piece.name in names and self.server(piece.shard, target) == source
        ]

    def _part(self, piece: Piece) -> Tensor:
        place, tensor = self.opened(piece.shard)[piece.name]
        return piece.box.of(tensor, box_of(place))

    def _bytes_of(self, piece: Piece) -> Tensor:
        return self._part(piece).contiguous().flatten().view(torch.uint8)


def empty(place: Place) -> Tensor:
    return torch.empty(place.shape, dtype=DTYPES[place.dtype])


def rounds(places: Mapping[str, Place]) -> list[set[str]]:
    """Divide the tensors alike on all ranks: by the size of the whole ones."""
    found: list[set[str]] = []
    room = 0
    for name, place in sorted(places.items()):
        size = math.prod(place.whole) * DTYPES[place.dtype].itemsize
        if not found or size > room:
            found.append(set())
            room = AT_ONCE_BYTES
        found[-1].add(name)
        room -= size
    return found
