"""Keep the files that a node writes also on the nodes after it, where nodes share no disk."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from orchestrator.common.errors import JobFailed
from orchestrator.engine.ranks.ranks import Ranks, gather
from orchestrator.engine.saving import carry
from orchestrator.engine.saving.carry import Errand, identity_of
from orchestrator.engine.saving.reader import METADATA
from orchestrator.engine.saving.writer import ALIKE, CONSTANT, Saved
from orchestrator.records.checkpoint_store import FileRecord

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
    before: Saved | None,
) -> tuple[dict[str, tuple[int, ...]], str]:
    """Give the files of each node to the nodes after it; say why one could not be kept.

    What is the same in an earlier checkpoint is linked there. Returns the identities of the files
    that the next checkpoints may link.
    """
    errands = errands_of(files, ranks.nodes, copies)
    constant = {
        errand.name for errand in errands if errand.target == ranks.rank and CONSTANT in errand.name
    }
    linked = {
        name
        for name in constant
        if before is not None
        and before.files.get(name) == files[name]
        and before.link(name, final / name)
    }
    there = gather(linked, group)
    errands = [errand for errand in errands if errand.name not in there[errand.target]]

    def path(errand: Errand) -> Path:
        return final / errand.name

    problems = carry.carry(errands, ranks.rank, group, path, path)
    host = ranks.nodes[ranks.rank][1]
    trouble = next((f"{errand.name} on {host}: {text}" for errand, text in problems.items()), "")
    identities = {n: identity_of(final / n) for n in constant if (final / n).exists()}
    return identities, next(filter(None, gather(trouble, group)), "")


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
        return f"{what}; checkpoint.copies=2 keeps each part on a second node as well"
    where = "the next node" if further == 1 else f"the next {further} nodes"
    fewer = f" (there are {nodes} nodes, not {copies})" if copies > nodes else ""
    return f"{what}, with a copy on {where}{fewer}"
