"""Carry files between the disks of nodes, from rank to rank over gloo.

All ranks are given the same errands. Each sends and receives its own a piece at a time, so that a
rank needs a few pieces of memory whatever the files are, and all nodes are busy at once.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist

from orchestrator.common.files import AS_USUAL, replacing, sync_directory
from orchestrator.records.checkpoint_manifest import FileRecord

PIECE_BYTES = 4 << 20
ERRANDS_AT_ONCE = 64  # of all ranks: they bound the files and the pieces of one
DAMAGED = "it arrived damaged"


@dataclass(frozen=True)
class Errand:
    """One file on its way from a rank to another."""

    source: int
    target: int
    name: str
    record: FileRecord


Place = Callable[[Errand], Path]


def carry(
    errands: Sequence[Errand], rank: int, group: dist.ProcessGroup | None, here: Place, there: Place
) -> dict[Errand, str]:
    """Do all errands; returns those to this rank that failed, and why.

    A file shows up under its name when its checksum is right. here() is where this rank's files to
    send are, there() where those go that it receives.
    """
    problems: dict[Errand, str] = {}
    for first in range(0, len(errands), ERRANDS_AT_ONCE):
        some = list(enumerate(errands))[first : first + ERRANDS_AT_ONCE]
        out = [Outgoing(tag, errand, here) for tag, errand in some if errand.source == rank]
        into = [Incoming(tag, errand, there) for tag, errand in some if errand.target == rank]
        ends: list[Outgoing | Incoming] = [*out, *into]
        longest = max((end.errand.record.size for end in ends), default=0)
        for at in range(0, longest, PIECE_BYTES):
            work = [end.post(at, group) for end in ends if at < end.errand.record.size]
            for end in work:
                if end is not None:
                    end.wait()
            for incoming in into:
                incoming.write(at)
        problems |= {end.errand: problem for end in into if (problem := end.finish())}
    return problems


class Outgoing:
    """A file that this rank sends; what cannot be read goes as zeros, and arrives damaged."""

    def __init__(self, tag: int, errand: Errand, here: Place) -> None:
        self.tag, self.errand, self.path = tag, errand, here(errand)

    def post(self, at: int, group: dist.ProcessGroup | None) -> dist.Work | None:
        piece = bytearray(min(PIECE_BYTES, self.errand.record.size - at))
        with contextlib.suppress(OSError), self.path.open("rb", buffering=0) as file:
            file.seek(at)
            file.readinto(piece)
        return dist.isend(
            torch.frombuffer(piece, dtype=torch.uint8), self.errand.target, group, self.tag
        )


class Incoming:
    """A file that this rank receives; after a full disk it takes what comes, and throws it away."""

    def __init__(self, tag: int, errand: Errand, there: Place) -> None:
        self.tag, self.errand, self.path = tag, errand, there(errand)
        self.buffer = bytearray(min(PIECE_BYTES, errand.record.size))
        self.sum, self.problem = hashlib.sha256(), ""
        self.file: BinaryIO | None = None
        self.opened = contextlib.ExitStack()
        with self._noted():
            new = replacing(self.path, AS_USUAL & ~0o022)
            self.file = self.opened.enter_context(new)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.problem = self.problem or f"{error.strerror or error} ({self.path.parent})"

    def post(self, at: int, group: dist.ProcessGroup | None) -> dist.Work | None:
        left = memoryview(self.buffer)[: self.errand.record.size - at]
        piece = torch.frombuffer(left, dtype=torch.uint8)
        return dist.irecv(piece, self.errand.source, group, self.tag)

    def write(self, at: int) -> None:
        left = self.errand.record.size - at
        if left > 0 and self.file is not None and not self.problem:
            data = memoryview(self.buffer)[:left]
            self.sum.update(data)
            with self._noted():
                self.file.write(data)

    def finish(self) -> str:
        """Publish the file under its name if its checksum is right; return what went wrong."""
        if not self.problem and self.sum.hexdigest() != self.errand.record.sha256:
            self.problem = DAMAGED
        with self._noted():
            with self.opened:
                if self.problem:
                    raise OSError(self.problem)  # so that the new file is removed
            sync_directory(self.path.parent)
        return self.problem


def of_nodes(nodes: Sequence[tuple[int, str]]) -> Mapping[int, list[int]]:
    """List the ranks of each node."""
    ranks: dict[int, list[int]] = {}
    for rank, (node, _) in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    return ranks
