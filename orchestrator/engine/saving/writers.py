"""Find out which ranks write a checkpoint together: by the directories that they see."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from orchestrator.common.errors import CheckFailed
from orchestrator.engine.ranks.ranks import Ranks, gather
from orchestrator.engine.saving import carry
from orchestrator.engine.sharding.mesh import Mesh

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
