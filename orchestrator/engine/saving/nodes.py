"""Find out which ranks write a checkpoint together, and keep copies where nodes share no disk."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from orchestrator.common.errors import CheckFailed, JobFailed
from orchestrator.engine.ranks.ranks import Ranks, gather
from orchestrator.engine.saving import carry
from orchestrator.engine.saving.carry import Errand
from orchestrator.engine.saving.reader import METADATA
from orchestrator.engine.saving.writer import ALIKE
from orchestrator.engine.sharding.mesh import Mesh
from orchestrator.records.checkpoint_store import FileRecord

SEEN_WITHIN_SECONDS = 3.0  # a file of another node shows up on a shared disk (NFS caches)


@dataclass(frozen=True)
class Writers:
    """The ranks that together write one complete checkpoint: all, or those of one node."""

    group: dist.ProcessGroup | None
    first: bool  # this rank writes the manifest
    publishes: bool  # and this one publishes and prunes: one for each directory
    members: tuple[int, ...]
    apart: bool = False  # onto the disks of several nodes


def writers(
    directory: Path, token: str, ranks: Ranks, purpose: str, *, node_holds_all: bool
) -> Writers:
    """Return all ranks, where they see one directory or no node holds all; else those of a node."""
    mine = f".seen_{token}_{ranks.rank}"
    problem = ""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / mine).touch()
    except OSError as error:
        problem = f"{directory}: {error.strerror}"
    if problem := next(filter(None, gather(problem)), ""):
        raise CheckFailed(
            f"checkpoints cannot be written: {problem}",
            "set checkpoint.directory to a place that every rank can write to",
        )
    members = ranks.neighbours
    answers = gather([seen(directory / f".seen_{token}_{rank}") for rank in (0, members[0])])
    shared, together = (all(column) for column in zip(*answers, strict=True))
    (directory / mine).unlink()
    if not shared and not together:
        raise CheckFailed(
            "the ranks of one node do not share the directory of the checkpoints",
            "set checkpoint.directory to a place that all of them see",
        )
    apart = not shared and not node_holds_all
    sets = [list(range(ranks.world))]
    if not shared and not apart:
        sets = [members for _, members in sorted(carry.of_nodes(ranks.nodes).items())]
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
    """Make a group for the thread that writes, once: each has threads and files of its own."""
    if world is None:
        return None
    group: dist.ProcessGroup | None = dist.new_group(list(members), backend="gloo")
    return group


def holds_all(mesh: Mesh, ranks: Ranks) -> bool:
    """Return True if each node has all parameters by itself."""
    counts = [len(members) for members in carry.of_nodes(ranks.nodes).values()]
    return mesh.mesh is None or (
        mesh.copies > 1 and all(count % mesh.mesh.size(-1) == 0 for count in counts)
    )


def seen(mark: Path) -> bool:
    """Return True once another rank's file shows up here; another node's may take a moment."""
    deadline = time.monotonic() + SEEN_WITHIN_SECONDS
    while not mark.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# -- copies on other nodes -------------------------------------------------------------------------


WRITER = re.compile(r"__([0-9]+)_")


def writer_of(name: str) -> int:
    """Return the rank that has written a file, as torch names it."""
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
    """Copy the files of each node to the nodes after it; return why one could not be kept."""

    def path(errand: Errand) -> Path:
        return final / errand.name

    errands = errands_of(files, ranks.nodes, copies)
    problems = carry.carry(errands, ranks.rank, group, path, path)
    host = ranks.nodes[ranks.rank][1]
    trouble = next((f"{errand.name} on {host}: {text}" for errand, text in problems.items()), "")
    return next(filter(None, gather(trouble, group)), "")


def errands_of(
    files: Mapping[str, FileRecord], nodes: Sequence[tuple[int, str]], copies: int
) -> list[Errand]:
    """Send each rank's files to a rank of the next node, and of those after it.

    What all ranks have alike goes to every node.
    """
    members = carry.of_nodes(nodes)
    order = sorted(members)
    errands = []
    for name, record in files.items():
        if name == METADATA:
            continue  # every node has it
        writer = writer_of(name)
        node = nodes[writer][0]
        local = members[node].index(writer)
        most = len(order) if ALIKE in name else min(copies, len(order))
        for distance in range(1, most):
            ranks = members[order[(order.index(node) + distance) % len(order)]]
            errands.append(Errand(writer, ranks[local % len(ranks)], name, record))
    return errands


def picture(nodes: int, copies: int) -> str:
    """Describe what is kept where."""
    what = "the nodes share no disk: each keeps its own part of every checkpoint"
    further = min(copies, nodes) - 1
    if not further:
        return f"{what}; checkpoint.copies=2 keeps each part on a second node as well"
    where = "the next node" if further == 1 else f"the next {further} nodes"
    fewer = f" (there are {nodes} nodes, not {copies})" if copies > nodes else ""
    return f"{what}, with a copy on {where}{fewer}"
