"""Determines which ranks write a checkpoint together, and sends files between nodes over gloo.

All ranks get the same deliveries. Each sends and receives its own a piece at a time. So a rank
needs memory for a few pieces, however large the files are, and all nodes work at once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist

from orchestrator.common.errors import CheckFailed, JobFailed
from orchestrator.common.files import (
    AS_USUAL,
    is_local,
    open_replacement,
    sync_directory,
)
from orchestrator.engine.ranks.ranks import Ranks, gather_values, run_together
from orchestrator.engine.saving.reader import METADATA, first_cause
from orchestrator.engine.saving.writer import ALIKE
from orchestrator.engine.sharding.mesh import Mesh
from orchestrator.protocol.timing import SEEN_WITHIN_SECONDS
from orchestrator.records.checkpoint_manifest import FileRecord
from orchestrator.records.checkpoint_parts import Delivery


@dataclass(frozen=True)
class Writers:
    """The ranks that write one complete checkpoint together: all, or those of one node."""

    group: dist.ProcessGroup | None
    # True for the rank that writes the manifest.
    first: bool
    # True for the rank that publishes and prunes: one for each directory.
    publishes: bool
    members: tuple[int, ...]
    # True if its files are on the disks of several nodes.
    apart: bool = False


def choose_writers(
    directory: Path, token: str, ranks: Ranks, purpose: str, *, node_holds_all: bool
) -> Writers:
    """Return all ranks if they see one directory or no node holds all parameters, else a node's."""
    mine = f".seen_{token}_{ranks.rank}"

    def mark() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / mine).touch()

    run_together(
        mark,
        said=lambda error: CheckFailed(
            f"checkpoints cannot be written: {directory}: {first_cause(error)}",
            "set checkpoint.directory to a place that every rank can write to",
        ),
    )
    members = ranks.neighbours
    answers = gather_values(
        [wait_for_mark(directory / f".seen_{token}_{rank}", purpose) for rank in (0, members[0])]
    )
    shared, on_node = (all(column) for column in zip(*answers, strict=True))
    (directory / mine).unlink()
    if not shared and not on_node:
        raise CheckFailed(
            "the ranks of one node do not share the directory of the checkpoints",
            "set checkpoint.directory to a place that all of them see",
        )
    apart = not shared and not node_holds_all
    sets = [list(range(ranks.world))]
    if not shared and not apart:
        sets = [members for _, members in sorted(ranks_of_nodes(ranks.nodes).items())]
    world = dist.group.WORLD if dist.is_initialized() else None
    groups = [writing_group(purpose, world, tuple(each)) for each in sets]
    group, all_of_it = next(
        (group, each) for group, each in zip(groups, sets, strict=True) if ranks.rank in each
    )
    return Writers(
        group,
        first=ranks.rank == all_of_it[0],
        publishes=ranks.rank == (members if apart else all_of_it)[0],
        members=tuple(all_of_it),
        apart=apart,
    )


@functools.cache
def writing_group(
    _purpose: str, world: dist.ProcessGroup | None, members: tuple[int, ...]
) -> dist.ProcessGroup | None:
    """Return the process group of the writing thread. It is cached: each has threads and files."""
    if world is None:
        return None
    group: dist.ProcessGroup | None = dist.new_group(list(members), backend="gloo")
    return group


def holds_all(mesh: Mesh, ranks: Ranks) -> bool:
    """Return True if each node has all parameters by itself."""
    return mesh.mesh is None or (
        mesh.copies > 1
        and all(
            len(members) % mesh.mesh.size(-1) == 0
            for members in ranks_of_nodes(ranks.nodes).values()
        )
    )


def wait_for_mark(mark: Path, purpose: str) -> bool:
    """Wait for another rank's file. Return False if it does not appear in time."""
    # In memory a node has its own files alone: those of another one never appear.
    may_be_late = purpose == "disk" and not is_local(mark.parent)
    deadline = time.monotonic() + SEEN_WITHIN_SECONDS * may_be_late
    while not mark.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# -- files from node to node -----------------------------------------------------------------------


PIECE_BYTES = 4 << 20
# Counts those of all ranks. It bounds the open files and the buffers of one rank.
DELIVERIES_AT_ONCE = 64


Place = Callable[[Delivery], Path]


def carry_files(
    deliveries: Sequence[Delivery],
    rank: int,
    group: dist.ProcessGroup | None,
    here: Place,
    there: Place,
) -> dict[Delivery, str]:
    """Transfer files between ranks. Return the failed deliveries to this rank, with the reasons.

    here() returns the path of a file that this rank sends, there() of one that it receives. A file
    gets its name only if its checksum is right. Every rank calls it, with the same deliveries.
    """
    problems: dict[Delivery, str] = {}
    for first in range(0, len(deliveries), DELIVERIES_AT_ONCE):
        some = list(enumerate(deliveries))[first : first + DELIVERIES_AT_ONCE]
        out = [Outgoing(tag, delivery, here) for tag, delivery in some if delivery.source == rank]
        into = [Incoming(tag, delivery, there) for tag, delivery in some if delivery.target == rank]
        ends: list[Outgoing | Incoming] = [*out, *into]
        longest = max((end.delivery.record.size for end in ends), default=0)
        for at in range(0, longest, PIECE_BYTES):
            work = [end.post(at, group) for end in ends if at < end.delivery.record.size]
            for end in work:
                if end is not None:
                    end.wait()
            for incoming in into:
                incoming.write(at)
        problems |= {end.delivery: problem for end in into if (problem := end.finish())}
    return problems


class Outgoing:
    """A file that this rank sends. Unreadable pieces are sent as zeros, and arrive damaged."""

    def __init__(self, tag: int, delivery: Delivery, here: Place) -> None:
        self.tag, self.delivery, self.path = tag, delivery, here(delivery)

    def post(self, at: int, group: dist.ProcessGroup | None) -> dist.Work | None:
        piece = bytearray(min(PIECE_BYTES, self.delivery.record.size - at))
        with contextlib.suppress(OSError), self.path.open("rb", buffering=0) as file:
            file.seek(at)
            file.readinto(piece)
        return dist.isend(
            torch.frombuffer(piece, dtype=torch.uint8), self.delivery.target, group, self.tag
        )


class Incoming:
    """A file that this rank receives. After a write error, it receives the rest and drops it."""

    def __init__(self, tag: int, delivery: Delivery, there: Place) -> None:
        self.tag, self.delivery, self.path = tag, delivery, there(delivery)
        self.buffer = bytearray(min(PIECE_BYTES, delivery.record.size))
        self.sum, self.problem = hashlib.sha256(), ""
        self.file: BinaryIO | None = None
        self.opened = contextlib.ExitStack()
        with self._noted():
            new = open_replacement(self.path, AS_USUAL & ~0o022)
            self.file = self.opened.enter_context(new)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.problem = self.problem or f"{error.strerror or error} ({self.path.parent})"

    def post(self, at: int, group: dist.ProcessGroup | None) -> dist.Work | None:
        left = memoryview(self.buffer)[: self.delivery.record.size - at]
        piece = torch.frombuffer(left, dtype=torch.uint8)
        return dist.irecv(piece, self.delivery.source, group, self.tag)

    def write(self, at: int) -> None:
        left = self.delivery.record.size - at
        if left > 0 and self.file is not None and not self.problem:
            data = memoryview(self.buffer)[:left]
            self.sum.update(data)
            with self._noted():
                self.file.write(data)

    def finish(self) -> str:
        """Publish the file if its checksum is right. Return the problem otherwise."""
        if not self.problem and self.sum.hexdigest() != self.delivery.record.sha256:
            self.problem = "it arrived damaged"
        with self._noted():
            with self.opened:
                if self.problem:
                    # The error makes open_replacement() remove the new file.
                    raise OSError(self.problem)
            sync_directory(self.path.parent)
        return self.problem


def ranks_of_nodes(nodes: Sequence[tuple[int, str]]) -> Mapping[int, list[int]]:
    """Return the ranks of each node."""
    ranks: dict[int, list[int]] = {}
    for rank, (node, _) in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    return ranks


# -- copies on other nodes -------------------------------------------------------------------------


WRITER = re.compile(r"__([0-9]+)_")


def writer_of(name: str) -> int:
    """Return the rank that wrote a file, which torch puts into its name."""
    match = WRITER.match(name)
    if match is None:
        raise JobFailed(f"torch has written {name}, and no rank has this name")
    return int(match[1])


def keep_copies(
    final: Path,
    files: Mapping[str, FileRecord],
    ranks: Ranks,
    group: dist.ProcessGroup | None,
    copies: int,
) -> str:
    """Copy the files of each node to the nodes after it. Return why a copy failed."""

    def path(delivery: Delivery) -> Path:
        return final / delivery.name

    deliveries = deliveries_of(files, ranks.nodes, copies)
    problems = carry_files(deliveries, ranks.rank, group, path, path)
    trouble = next(
        (f"{each.name} on {ranks.nodes[ranks.rank][1]}: {text}" for each, text in problems.items()),
        "",
    )
    return next(filter(None, gather_values(trouble, group)), "")


def deliveries_of(
    files: Mapping[str, FileRecord], nodes: Sequence[tuple[int, str]], copies: int
) -> list[Delivery]:
    """Plan copies of each rank's files on the next nodes, `copies` in all.

    The files with values that are equal on all ranks go to every node.
    """
    members = ranks_of_nodes(nodes)
    order = sorted(members)
    deliveries = []
    for name, record in files.items():
        if name == METADATA:
            # Every node has it already.
            continue
        writer = writer_of(name)
        node = nodes[writer][0]
        local = members[node].index(writer)
        most = len(order) if ALIKE in name else min(copies, len(order))
        for distance in range(1, most):
            ranks = members[order[(order.index(node) + distance) % len(order)]]
            deliveries.append(Delivery(writer, ranks[local % len(ranks)], name, record))
    return deliveries
