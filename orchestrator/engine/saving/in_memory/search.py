"""Find what an earlier attempt of the job has kept in memory: the newest state that is whole.

All shards of a state are verified where they lie, by the ranks that share that memory. Then each
rank is brought its parts, whether the ranks before were laid out as these are or not.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.common.text import Say
from orchestrator.engine.saving.exchange import Exchange, Parts, agreed_pieces, everyone
from orchestrator.engine.saving.in_memory import memory_file
from orchestrator.engine.saving.in_memory.files import Files
from orchestrator.engine.saving.in_memory.memory_file import Damaged, Notes
from orchestrator.engine.saving.in_memory.shards import (
    Entry,
    Members,
    Whole,
    newest_whole,
    source_of,
)
from orchestrator.engine.saving.ownership import attempt
from orchestrator.engine.saving.pieces import DTYPES, Piece

T = TypeVar("T")
Held = list[list[Entry]]  # by place: what is in the memory of each node
Sources = dict[tuple[int, int], tuple[int, Entry]]  # (place, shard) -> the place that has it


class Found:
    """The newest whole state, and the way of its tensors to this rank."""

    def __init__(
        self,
        search: Search,
        whole: Whole,
        sources: Sources,
        here: Mapping[int, Entry],  # by shard: the files of this node that count
        notes: Mapping[int, Notes],
    ) -> None:
        self.search, self.whole, self.sources, self.here = search, whole, sources, here
        self.members = search.members
        self.alike = search.is_alike(whole)
        self.notes = notes[self.members.shard if self.alike else 0]
        self.layout = "" if self.alike else whole.layout  # of the ranks that kept it, if another
        shards = [self.members.shard] if self.alike else sorted(notes)
        self.kept = {shard: notes[shard].tensors for shard in shards}
        self.size = sum({entry.shard: entry.head.size for _, entry in sources.values()}.values())
        elsewhere = {place for (place, _), (there, _) in sources.items() if there != place}
        self.travelled = sum(  # ranks that take a part of theirs from another node
            place in elsewhere and (not self.alike or sources[place, shard][0] != place)
            for place, shard in zip(self.members.places, self.members.shards, strict=True)
        )

    def bring(self, into: Parts) -> None:
        """Fill each rank's tensors. If one rank cannot have them, all hear of it."""
        mine, search = self.members.place, self.search
        near = {
            shard for (place, shard), (there, _) in self.sources.items() if place == there == mine
        }
        shown = f"the state of step {self.notes.step} in {search.files.where}"
        pieces = agreed_pieces(into, self.kept, near, shown, search.group)
        opened = functools.cache(
            lambda shard: memory_file.read(search.files.where / self.here[shard].file)
        )

        def read(pieces: Sequence[Piece], parts: Sequence[Tensor]) -> None:
            for piece, part in zip(pieces, parts, strict=True):
                kept = memory_file.tensor_at(piece.place, opened(piece.shard).payload)
                part.copy_(piece.box.of(kept, piece.place))

        Exchange(pieces, self._server, read, self.members.rank, search.group).bring(into)

    def tensors_here(self) -> dict[str, Tensor]:
        """Bring each rank the tensors of its own shard, whatever the other ranks have."""
        tensors = {p.name: torch.empty(p.shape, dtype=DTYPES[p.dtype]) for p in self.notes.tensors}
        self.bring({place.name: (place, tensors[place.name]) for place in self.notes.tensors})
        return tensors

    def _server(self, shard: int) -> int:
        """Choose the rank that gives a shard to this one: itself, if its node has it."""
        rank = self.members.rank
        there = self.members.at(self.sources[self.members.place, shard][0])
        return rank if rank in there else there[rank % len(there)]


class Search:
    """Looks through the memory of all nodes. Every rank makes one, and calls newest()."""

    def __init__(
        self,
        files: Files,
        members: Members,
        fingerprint: Mapping[str, str],
        layout: str,
        group: dist.ProcessGroup | None,
        say: Say,
    ) -> None:
        self.files, self.members, self.fingerprint = files, members, fingerprint
        self.layout, self.group, self.say = layout, group, say

    def everyone(self, what: T) -> list[T]:
        return everyone(what, self.group)

    def is_alike(self, whole: Whole) -> bool:
        return (whole.layout, whole.shards) == (self.layout, self.members.count)

    def newest(self) -> tuple[str, Found | None]:
        """Return the name of this attempt, and the newest state that is whole and verifies."""
        kept = list(self.files.entries(self.fingerprint)) if self.members.first else None
        listed = [entries for entries in self.everyone(kept) if entries is not None]
        latest = max((entry.state.attempt for entries in listed for entry in entries), default="")
        name = self.everyone(next_attempt(latest))[0]
        strange = next((e.difference for entries in listed for e in entries if e.difference), "")
        held = [[entry for entry in entries if not entry.difference] for entries in listed]
        if strange and not any(held):
            self.say(f"what is in memory is skipped: {strange}")
        while (whole := newest_whole(held)) is not None:
            found, bad = self._verified(whole, held)
            if found is not None:
                return name, found
            held = [[entry for entry in entries if (place, entry.file) not in bad]
                    for place, entries in enumerate(held)]  # fmt: skip
        if any(held):
            self._say_what_is_lost(held)
        return name, None

    def _say_what_is_lost(self, held: Held) -> None:
        entries = [entry for some in held for entry in some]
        last = max(entry.state for entry in entries)
        layout = last.layout, last.shards
        there = {e.shard for e in entries if (e.state.layout, e.state.shards) == layout}
        lost = sorted(set(range(last.shards)) - there)
        what = f"shard {lost[0]} of {last.shards} is lost" if lost else "shards of several steps"
        self.say(f"what is in memory is skipped: no state is whole over all ranks ({what})")

    def _sources(self, whole: Whole, held: Held) -> Sources:
        """Say where each place takes the shards from that its ranks need."""
        needs = zip(self.members.places, self.members.shards, strict=True)
        alike = self.is_alike(whole)
        wanted = [
            (place, number)
            for place, shard in needs
            for number in ([shard] if alike else range(whole.shards))
        ]
        return {(place, shard): source_of(shard, place, whole, held) for place, shard in wanted}

    def _verified(self, whole: Whole, held: Held) -> tuple[Found | None, set[tuple[int, str]]]:
        """Verify what counts where it lies; or name the files that are damaged."""
        sources, place = self._sources(whole, held), self.members.place
        here = {entry.shard: entry for there, entry in sources.values() if there == place}
        asked = {shard for (other, shard), (there, _) in sources.items() if there == place != other}
        members = self.members.at(place)
        problem, bad, notes = "", set[tuple[int, str]](), dict[int, Notes]()
        for shard in sorted(here)[members.index(self.members.rank) :: len(members)]:
            try:
                state = memory_file.verified(self.files.where / here[shard].file)
            except Damaged as error:
                problem = str(error)
                bad.add((place, here[shard].file))
            else:
                notes |= {shard: state.notes} if shard in asked else {}
        answers = self.everyone((problem, bad, notes))
        bad = set().union(*(files for _, files, _ in answers))
        if bad:
            self._say_what_is_damaged(whole, [problem for problem, _, _ in answers])
            return None, bad
        notes = {shard: its for _, _, some in answers for shard, its in some.items()}
        for shard, entry in here.items():
            if shard not in notes:  # nobody else asks for it, so it has not travelled
                notes[shard] = memory_file.describe(self.files.where / entry.file)[1]
        return Found(self, whole, sources, here, notes), bad

    def _say_what_is_damaged(self, whole: Whole, problems: Sequence[str]) -> None:
        rank, problem = next((rank, text) for rank, text in enumerate(problems) if text)
        self.say(f"WARNING: in memory, the state of step {whole.step} cannot be trusted as rank"
                 f" {rank} has it: {problem}; trying another")  # fmt: skip


def next_attempt(latest: str) -> str:
    """Name an attempt of the job, so that later ones sort behind; two of them never mix.

    The head's own number counts as well: nodes that are new to the job know of no attempt.
    """
    number = latest.partition("-")[0]
    following = max((int(number) if number.isdecimal() else 0) + 1, attempt())
    return f"{following:06d}-{secrets.token_hex(4)}"
