"""Carry files between the disks of nodes, from rank to rank over gloo.

All ranks are given the same errands. Each sends and receives its own a piece at a time, so that a
rank needs a few pieces of memory whatever the files are, and all nodes are busy at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from orchestrator.common.errors import JobFailed, UsageError
from orchestrator.common.files import AS_USUAL, replacing, sync_directory
from orchestrator.engine.ranks.collectives import has_others
from orchestrator.engine.ranks.ranks import gather, host_group
from orchestrator.records import checkpoint_store
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


# -- for a script that saves on rank 0 alone ------------------------------------------------------


def copy_to_nodes(path: str | Path, *, missing_ok: bool = False) -> int:
    """Copy a file or directory of rank 0 to every node; return the number of files that came.

    Every rank calls it, with the path as it is on its own node. What a node has already stays, and
    nodes that see the disk of rank 0 get nothing. Where rank 0 has nothing it is an error, or, with
    missing_ok, nothing happens.
    """
    path = Path(path)
    if not has_others():
        return 0
    group, rank = host_group(), dist.get_rank()
    # First of all the nodes: until a rank of rank 0's node is here, it may still be writing there.
    nodes = gather(os.environ.get("GROUP_RANK") or os.uname().nodename)
    offered: Any = gather(offer(path) if rank == 0 else None)[0]
    if not offered and missing_ok:
        return 0
    if not offered:
        raise UsageError(
            f"rank 0 has no file at {path}", "it is written there before all ranks call this"
        )
    if isinstance(offered, str):
        raise JobFailed(offered)
    receives = nodes.index(nodes[rank]) == rank and nodes[rank] != nodes[0]
    wanted = gather([name for name in offered if lacks(path / name, offered[name])]
                    if receives else [])  # fmt: skip
    errands = [
        Errand(0, target, name, offered[name].record)
        for target, names in enumerate(wanted)
        for name in names
    ]
    problem = ""
    try:
        for errand in errands:
            if errand.target == rank:
                (path / errand.name).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
    refuse(gather(problem), path)
    problems = carry(errands, rank, group, lambda errand: path / errand.name,
                     lambda errand: path / errand.name)  # fmt: skip
    refuse(gather(next((f"{e.name}: {text}" for e, text in problems.items()), "")), path)
    return len(errands)


@dataclass(frozen=True)
class Offered:
    """A file of rank 0's, and what shows that another rank sees the very same one."""

    record: FileRecord
    identity: tuple[int, ...]


def offer(path: Path) -> dict[str, Offered] | str:
    """Describe the files at a path; or say why they cannot be read."""
    try:
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        found = {}
        for file in files:
            name = "" if file == path else str(file.relative_to(path))
            found[name] = Offered(checkpoint_store.digest(file), identity_of(file))
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return found


def identity_of(path: Path) -> tuple[int, ...]:
    """Return what is the same of a file on all nodes that see it, until it is written to."""
    status = path.lstat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def lacks(path: Path, offered: Offered) -> bool:
    """Return True if this node lacks a file, or has another one there."""
    try:
        if path.stat().st_size != offered.record.size:
            return True
        same = identity_of(path) == offered.identity
        return not same and checkpoint_store.digest(path) != offered.record
    except OSError:
        return True


def refuse(problems: Sequence[str], path: Path) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            raise JobFailed(f"{path} has not come to the node of rank {rank}: {problem}")
