"""Carry files between the disks of nodes, from rank to rank over gloo.

All ranks are given the same errands. Each sends and receives its own a piece at a time, so that a
rank needs a few pieces of memory whatever the files are, and all nodes are busy at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
import torch.distributed as dist

from orchestrator.engine.saving.safetensors_file import memory
from orchestrator.files import AS_USUAL, sync_directory
from orchestrator.records.checkpoint_manifest import FileRecord

PIECE = 4 << 20  # bytes
AT_ONCE = 4  # files that a rank sends, and as many that it receives
DAMAGED = "it arrived damaged"


@dataclass(frozen=True)
class Errand:
    """One file on its way from a rank to another."""

    source: int
    target: int
    name: str
    record: FileRecord
    kind: str = ""  # which of the directories it is from


Place = Callable[[Errand], Path]


def carry(
    errands: Sequence[Errand], rank: int, group: dist.ProcessGroup | None, here: Place, there: Place
) -> dict[Errand, str]:
    """Do all errands; returns those to this rank that failed, and why.

    A file shows up under its name when its checksum is right. here() is where this rank's files to
    send are, there() where those go that it receives.
    """
    problems: dict[Errand, str] = {}
    for wave in waves(errands):
        out = [Outgoing(tag, errand, here) for tag, errand in wave if errand.source == rank]
        into = [Incoming(tag, errand, there) for tag, errand in wave if errand.target == rank]
        ends: list[Outgoing | Incoming] = [*out, *into]
        longest = max((each.errand.record.size for each in ends), default=0)
        for at in range(0, longest, PIECE):
            work = [each.post(at, group) for each in ends if at < each.errand.record.size]
            for each in work:
                if each is not None:
                    each.wait()
            for incoming in into:
                incoming.write(at)
        for outgoing in out:
            outgoing.close()
        problems |= {each.errand: problem for each in into if (problem := each.finish())}
    return problems


def waves(errands: Sequence[Errand]) -> list[list[tuple[int, Errand]]]:
    """Divide them so that no rank has too many files open; every rank divides them alike."""
    busy: dict[tuple[tuple[str, int], int], int] = {}
    wave_of: list[list[tuple[int, Errand]]] = []
    first: dict[tuple[str, int], int] = {}  # the first wave in which this end has room
    for tag, errand in enumerate(errands):
        ends = ("from", errand.source), ("to", errand.target)
        number = max(first.get(end, 0) for end in ends)
        while any(busy.get((end, number), 0) >= AT_ONCE for end in ends):
            number += 1
        for end in ends:
            busy[end, number] = busy.get((end, number), 0) + 1
            if busy[end, number] == AT_ONCE and first.get(end, 0) == number:
                first[end] = number + 1
        wave_of += [[] for _ in range(number + 1 - len(wave_of))]
        wave_of[number].append((tag, errand))
    return wave_of


class Outgoing:
    """A file that this rank sends; what cannot be read goes as zeros, and arrives damaged."""

    def __init__(self, tag: int, errand: Errand, here: Place) -> None:
        self.tag, self.errand = tag, errand
        self.piece = torch.empty(min(PIECE, errand.record.size), dtype=torch.uint8)
        self.file: FileIO | None = None
        with contextlib.suppress(OSError):
            self.file = FileIO(here(errand))

    def post(self, at: int, group: dist.ProcessGroup | None) -> dist.Work | None:
        piece = self.piece[: self.errand.record.size - at]
        if not self._read(at, memoryview(memory(piece)).cast("B")):
            piece.zero_()
        return dist.isend(piece, self.errand.target, group, self.tag)

    def _read(self, at: int, into: memoryview) -> bool:
        if self.file is None:
            return False
        try:
            self.file.seek(at)
            done = 0
            while done < len(into) and (count := self.file.readinto(into[done:])):
                done += count
        except OSError:
            return False
        return done == len(into)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class Incoming:
    """A file that this rank receives; after a full disk it takes what comes, and throws it away."""

    def __init__(self, tag: int, errand: Errand, there: Place) -> None:
        self.tag, self.errand = tag, errand
        self.path = there(errand)
        self.hidden = self.path.with_name(f".{secrets.token_hex(4)}.arriving")
        self.piece = torch.empty(min(PIECE, errand.record.size), dtype=torch.uint8)
        self.sum, self.problem = hashlib.sha256(), ""
        self.file: FileIO | None = None
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self.file = FileIO(os.open(self.hidden, flags, AS_USUAL & ~0o022), "wb")
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.problem = self.problem or f"{error.strerror or error} ({self.path.parent})"

    def post(self, at: int, group: dist.ProcessGroup | None) -> dist.Work | None:
        piece = self.piece[: self.errand.record.size - at]
        return dist.irecv(piece, self.errand.source, group, self.tag)

    def write(self, at: int) -> None:
        left = self.errand.record.size - at
        if left <= 0 or self.problem or self.file is None:
            return
        data = memoryview(memory(self.piece[:left])).cast("B")
        self.sum.update(data)
        try:
            done = 0
            while done < len(data):
                done += self.file.write(data[done:])
        except OSError as error:
            self._fail(error)

    def finish(self) -> str:
        """Let it show up under its name, if it is what was sent."""
        if self.file is not None:
            with self.file:
                try:
                    os.fsync(self.file.fileno())
                except OSError as error:
                    self._fail(error)
        if not self.problem and self.sum.hexdigest() != self.errand.record.sha256:
            self.problem = DAMAGED
        try:
            if not self.problem:
                self.hidden.replace(self.path)
                sync_directory(self.path.parent)
        except OSError as error:
            self._fail(error)
        if self.problem:
            with contextlib.suppress(OSError):
                self.hidden.unlink()
        return self.problem


def spread_over_ranks(number: int, source: Sequence[int], target: Sequence[int]) -> tuple[int, int]:
    """Choose the ranks of two nodes that carry the n-th file between them."""
    return source[number % len(source)], target[number % len(target)]


def of_nodes(nodes: Sequence[tuple[int, str]]) -> Mapping[int, list[int]]:
    """List the ranks of each node."""
    ranks: dict[int, list[int]] = {}
    for rank, (node, _) in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    return ranks
