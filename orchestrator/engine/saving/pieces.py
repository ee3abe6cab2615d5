"""Put a rank's part of each tensor together from the parts that ranks of another layout kept.

What each rank needs from which shard is worked out first, without touching a tensor. Then all ranks
send each other those pieces, some tensors at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.engine.ranks.ranks import gather
from orchestrator.engine.saving.in_memory.memory_file import DTYPES, Place

AT_ONCE = 256 << 20  # bytes of whole tensors; one that is larger goes alone


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
            waiting: list[tuple[Any, Tensor]] = []
            for rank, pieces in enumerate(self.wanted):
                asked = [p for p in pieces if p.name in names]
                if rank != self.rank and (own := self._from(self.rank, rank, asked)):
                    message = torch.cat([self._given(piece).flatten() for piece in own])
                    waiting.append((dist.isend(message, rank, self.group), message))
            mine = [piece for piece in self.wanted[self.rank] if piece.name in names]
            for source in range(len(self.wanted)):
                coming = self._from(source, self.rank, mine)
                sizes = [piece.box.size * parts[piece.name].element_size() for piece in coming]
                if source == self.rank:
                    arrived = [self._given(piece) for piece in coming]
                elif coming:
                    message = torch.empty(sum(sizes), dtype=torch.uint8)
                    dist.recv(message, source, self.group)
                    arrived = list(torch.split(message, sizes))
                else:
                    continue
                for piece, data in zip(coming, arrived, strict=True):
                    part = piece.box.of(parts[piece.name], box_of(targets[piece.name]))
                    part.copy_(data.clone().view(part.dtype).view(part.shape))  # aligned again
            for work, _ in waiting:
                work.wait()
        return parts

    def _from(self, source: int, target: int, pieces: Sequence[Piece]) -> list[Piece]:
        return [piece for piece in pieces if self.server(piece.shard, target) == source]

    def _given(self, piece: Piece) -> Tensor:
        """Return the bytes of a piece."""
        place, tensor = self.opened(piece.shard)[piece.name]
        part = piece.box.of(tensor, box_of(place)).contiguous()
        return part.flatten().view(torch.uint8)


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
            room = AT_ONCE
        found[-1].add(name)
        room -= size
    return found
