"""Save one checkpoint onto the disks of several nodes: each has its part, and perhaps others'.

All nodes have the same manifest, which lists the files of all. They show up under their names once
every node has its own described, so that none is published without the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.futures import Future

from orchestrator.engine.ranks.ranks import Ranks, gather
from orchestrator.engine.saving import carry
from orchestrator.engine.saving.carry import Errand
from orchestrator.engine.saving.reader import METADATA
from orchestrator.errors import JobFailed, OrchestratorError
from orchestrator.files import AS_USUAL, replace
from orchestrator.records import checkpoint_store
from orchestrator.records.checkpoint_store import FileRecord, Manifest

WRITER = re.compile(r"__([0-9]+)_")
ALIKE = "alike_"  # in the name of the file with what all ranks have alike


class PartWriter(FileSystemWriter):
    """Write what all ranks have alike (buffers, counters) into a file of its own, which is small:
    every node needs it, and none then needs the shards of another for it."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        shards = [item for item in plan.items if item.type == WriteItemType.SHARD]
        alike = [item for item in plan.items if item.type != WriteItemType.SHARD]
        results = list(super().write_data(replace_items(plan, shards), planner).wait())
        if alike:
            prefix = type(plan.storage_data)(plan.storage_data.prefix + ALIKE)
            own = dataclasses.replace(replace_items(plan, alike), storage_data=prefix)
            results += super().write_data(own, planner).wait()
        done: Future[list[Any]] = Future()
        done.set_result(results)
        return done


def replace_items(plan: SavePlan, items: list[Any]) -> SavePlan:
    return dataclasses.replace(plan, items=items)


@dataclass(frozen=True)
class Place:
    """The directory of a checkpoint that is being written, and who writes it."""

    partial: Path
    directory: Path
    ranks: Ranks
    group: dist.ProcessGroup | None
    publishes: bool  # the first rank of its node


def publish(
    place: Place,
    step: int,
    progress: Any,
    files: Mapping[str, FileRecord],
    save: str,
    trusting: Callable[[int], contextlib.AbstractContextManager[None]],
) -> Manifest:
    """Describe and publish the parts of all nodes, or of none. Every rank calls it; rank 0 knows
    the files and the progress. trusting() raises where the state is not to be published."""
    ranks = place.ranks
    box: list[Any] = [None]
    if ranks.rank == 0:
        try:
            hosts = {name: ranks.nodes[writer_of(name)][1] for name in files if name != METADATA}
            manifest = Manifest(step, time.time(), progress, ranks.world, files, save, hosts)
            box = [(manifest, (place.partial / METADATA).read_bytes())]
        except (OSError, JobFailed) as error:
            box = [str(error)]
    dist.broadcast_object_list(box, 0, place.group)
    if isinstance(box[0], str):
        raise JobFailed(box[0])
    manifest, metadata = cast("tuple[Manifest, bytes]", box[0])
    members = set(ranks.neighbours)
    own = [METADATA, *(name for name in manifest.hosts if writer_of(name) in members)]

    def describe() -> None:
        if ranks.rank:
            replace(place.partial / METADATA, metadata, AS_USUAL)
        checkpoint_store.describe(place.partial, place.directory, manifest, own)

    def put_in_place() -> None:
        checkpoint_store.put_in_place(place.partial, place.directory, step)

    for action in (describe, put_in_place):
        problem = ""
        try:
            with trusting(step):
                if place.publishes:
                    action()
        except (OSError, OrchestratorError) as error:
            problem = str(error)
        if trouble := next((text for text in gather(problem, place.group) if text), ""):
            raise JobFailed(trouble)
    return manifest


def writer_of(name: str) -> int:
    """Tell which rank has written a file, as torch names it."""
    match = WRITER.match(name)
    if match is None:
        raise JobFailed(f"torch has written {name}, and no rank has this name")
    return int(match[1])


def keep_copies(place: Place, manifest: Manifest, copies: int) -> str:
    """Give the files of each node to the nodes after it; say why one could not be kept."""
    final = checkpoint_store.final(place.directory, manifest.step)
    errands = errands_of(manifest.files, place.ranks.nodes, copies)

    def path(errand: Errand) -> Path:
        return final / errand.name

    problems = carry.carry(errands, place.ranks.rank, place.group, path, path)
    host = place.ranks.nodes[place.ranks.rank][1]
    own = next((f"{each.name} on {host}: {why}" for each, why in problems.items()), "")
    return next((problem for problem in gather(own, place.group) if problem), "")


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
    """Say what is kept where."""
    what = "the nodes share no disk: each keeps its own part of every checkpoint"
    further = min(copies, nodes) - 1
    if not further:
        return f"{what}; checkpoint.copies=2 keeps each part on a second node, too"
    where = "the next node" if further == 1 else f"the next {further} nodes"
    fewer = f" (there are {nodes} nodes, not {copies})" if copies > nodes else ""
    return f"{what}, with a copy on {where}{fewer}"
