"""Decide which rank keeps which shard, and which state is whole over all nodes. Pure."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.engine.saving.in_memory.memory_file import Head


@dataclass(frozen=True)
class Part:
    """Say what one rank does for each state."""

    writes: bool  # its shard, for its node
    to: int | None = None  # the rank of the next node that gets a copy
    sources: tuple[tuple[int, int], ...] = ()  # (shard, rank that sends it)


def parts(places: Sequence[int], shards: Sequence[int]) -> list[Part]:
    """Divide the work among the ranks, by the memory that each sees and the shard that it holds."""
    writers: dict[int, dict[int, int]] = {}  # shard -> place -> the first rank there
    members: dict[int, list[int]] = {}
    for rank, (place, shard) in enumerate(zip(places, shards, strict=True)):
        writers.setdefault(shard, {}).setdefault(place, rank)
        members.setdefault(place, []).append(rank)
    ring = sorted(members)
    to: dict[int, int] = {}
    sources: dict[int, list[tuple[int, int]]] = {}
    for shard, by_place in sorted(writers.items()):
        if len(by_place) > 1 or len(ring) == 1:
            continue  # another node's own rank has it, or there is no other
        ((place, writer),) = by_place.items()
        there = members[ring[(ring.index(place) + 1) % len(ring)]]
        to[writer] = there[members[place].index(writer) % len(there)]
        sources.setdefault(to[writer], []).append((shard, writer))
    return [
        Part(writers[shard][place] == rank, to.get(rank), tuple(sources.get(rank, ())))
        for rank, (place, shard) in enumerate(zip(places, shards, strict=True))
    ]


@dataclass(frozen=True)
class Members:
    """All ranks, by the memory that each sees (its place) and the shard that it holds."""

    rank: int
    places: tuple[int, ...]
    shards: tuple[int, ...]

    @property
    def place(self) -> int:
        return self.places[self.rank]

    @property
    def shard(self) -> int:
        return self.shards[self.rank]

    @property
    def count(self) -> int:
        """Return how many shards there are."""
        return len(set(self.shards))

    def at(self, place: int) -> list[int]:
        return [rank for rank, other in enumerate(self.places) if other == place]

    @property
    def first(self) -> bool:
        """Tell whether this is the first rank of its place."""
        return self.at(self.place)[0] == self.rank

    @functools.cached_property
    def parts(self) -> list[Part]:
        return parts(self.places, self.shards)

    @property
    def part(self) -> Part:
        return self.parts[self.rank]

    def kept_by(self, rank: int) -> list[int]:
        """List the shards that a rank keeps: its own first, then those of other nodes."""
        part = self.parts[rank]
        return [self.shards[rank]] * part.writes + [shard for shard, _ in part.sources]

    def kept_here(self) -> set[int]:
        return {shard for rank in self.at(self.place) for shard in self.kept_by(rank)}


@dataclass(frozen=True, order=True)
class Whole:
    """A state of which every shard is there; a later one is greater."""

    attempt: str
    turn: int
    step: int
    layout: str
    shards: int


@dataclass(frozen=True)
class Entry:
    """A file in the memory of a node, as it describes itself."""

    shard: int
    state: Whole  # that it is a shard of
    file: str
    head: Head
    difference: str = ""  # in which way it is not this program's


def newest_whole(held: Sequence[Sequence[Entry]]) -> Whole | None:
    """Return the newest state of which all shards are in the memory of some node."""
    there: dict[Whole, set[int]] = {}
    for entry in (entry for entries in held for entry in entries):
        there.setdefault(entry.state, set()).add(entry.shard)
    whole = (state for state, shards in there.items() if shards >= set(range(state.shards)))
    return max(whole, default=None)


def source_of(
    shard: int, place: int, whole: Whole, held: Sequence[Sequence[Entry]]
) -> tuple[int, Entry]:
    """Say from which place a rank takes its shard: its own, or else the first that has it."""
    for there in (place, *range(len(held))):
        for entry in held[there]:
            if entry.shard == shard and entry.state == whole:
                return there, entry
    raise AssertionError("a whole state has all shards")
