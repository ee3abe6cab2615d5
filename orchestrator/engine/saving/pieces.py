"""Know each part of a tensor by its place in the whole, and find the parts that make up another.

What a rank needs of each shard is worked out here without touching a tensor, whether shards are
files of a checkpoint on a disk or lie in the memory of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestrator.engine.sharding.mesh import local_part

DTYPES = {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
MOST_NAMED = 3


@dataclass(frozen=True)
class Box:
    """The start and the length of a part in each dimension of its tensor."""

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
class Place(Box):
    """A part of a named tensor, and the byte where it begins in the file that keeps it."""

    name: str
    dtype: str
    whole: tuple[int, ...]  # the shape of all of it
    offset: int = 0

    @property
    def bytes(self) -> int:
        return self.size * DTYPES[self.dtype].itemsize


def whole_place(name: str, dtype: torch.dtype, shape: Sequence[int]) -> Place:
    return Place((0,) * len(shape), tuple(shape), name, str(dtype), tuple(shape))


Shard = Any  # a file of a checkpoint, or the number of a shard in memory
Kept = Mapping[Shard, Sequence[Place]]


@dataclass(frozen=True)
class Piece:
    """Name what one rank takes of a part that a shard keeps."""

    shard: Shard
    place: Place
    box: Box

    @property
    def bytes(self) -> int:
        return self.box.size * DTYPES[self.place.dtype].itemsize

    def empty(self) -> Tensor:
        return torch.empty(self.box.shape, dtype=DTYPES[self.place.dtype])


def places_of(tensors: Mapping[str, Tensor]) -> list[Place]:
    """Say which part this rank has of each tensor."""
    places = []
    for name, tensor in tensors.items():
        start, shape = local_part(tensor)
        places.append(Place(start, shape, name, str(tensor.dtype), tuple(tensor.shape)))
    return places


def pieces_for(
    wanted: Iterable[Place], kept: Kept, near: Container[Shard]
) -> tuple[list[Piece], str]:
    """Choose from which shards to take the parts that are wanted, near ones first; or say which
    tensor cannot be put together."""
    by_name: dict[str, list[tuple[Shard, Place]]] = {}
    for shard in sorted(kept, key=lambda shard: (shard not in near, shard)):
        for place in kept[shard]:
            by_name.setdefault(place.name, []).append((shard, place))
    pieces: list[Piece] = []
    missing: list[str] = []
    for target in wanted:
        there = by_name.pop(target.name, [])
        if other := next((place for _, place in there if place.whole != target.whole), None):
            return [], f"{target.name} has the shape {other.whole} there, and {target.whole} here"
        lacking, used = target.size, set[Box]()
        for shard, place in there:
            box, common = Box(place.start, place.shape), place.common(target)
            if box not in used and common.size:  # several shards may hold the same
                used.add(box)
                pieces.append(Piece(shard, place, common))
                lacking -= common.size
        if lacking or not there:
            missing.append(target.name)
    if not missing:
        return pieces, ""
    only_there = f"; only there is {several(list(by_name))}" if by_name else ""
    return [], f"not all of {several(missing)} is there{only_there}"


def several(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"
