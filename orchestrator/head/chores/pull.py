"""Fetch files from many nodes at once: what a job left there, or any path."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from orchestrator.errors import OrchestratorError
from orchestrator.folder import Folder
from orchestrator.head.chores.numbered_node import NumberedNode
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import open_channel
from orchestrator.head.connect.ssh_config import Login
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow.fetch import Fetch, Fetched, plain
from orchestrator.head.screen.progress import Progress
from orchestrator.protocol.messages import OutputFile, OutputFiles, Request

LIST_SECONDS = 600.0
STEP = re.compile(r"(checkpoints/step_[0-9]+)(/|$)")
MANIFEST = "manifest.json"  # of a checkpoint

T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """A node, what is asked of it, and where its files go."""

    index: int
    name: str
    login: Login
    question: Request[OutputFiles]
    into: Folder
    replace: bool  # what is here under the same name


@dataclass(frozen=True)
class Pulled:
    """Hold what came from one node, or why nothing did."""

    source: Source
    result: Fetched = field(default_factory=Fetched)
    error: OrchestratorError | None = None


@dataclass(frozen=True)
class Listed:
    """A node that has answered what it has."""

    source: Source
    channel: NodeChannel
    place: str
    first: tuple[OutputFile, ...]
    again: tuple[OutputFile, ...] = ()  # what an earlier node has, too: to be compared with that
    left_out: tuple[str, ...] = ()


def directory_of(target: NumberedNode) -> str:
    """Name a node's own directory here as its logs are named."""
    host = re.sub(r"[^A-Za-z0-9_.%-]", "-", target.node.host)
    return f"node_{target.index}_{host}"


def pull(
    transport: Transport, sources: Sequence[Source], progress: Progress, *, dry_run: bool
) -> list[Pulled]:
    """Fetch from all nodes at once, and return in their order what came."""
    answers = fleet.everywhere(sources, lambda source: ask(transport, source))
    nodes = shared_out([answer for answer in answers if isinstance(answer, Listed)])
    progress.size = sum(file.size for node in nodes for file in (*node.first, *node.again))

    def fetch(node: Listed, files: Sequence[OutputFile]) -> Fetched:
        if dry_run:
            return Fetched([file.path for file in files])
        return Fetch(
            *(node.channel, node.place, node.source.into),
            label=f"node{node.source.index}",
            replace=node.source.replace,
            progress=progress.add,
        ).go(files)

    first = fleet.everywhere(nodes, lambda node: fetch(node, node.first))
    again = fleet.everywhere(nodes, lambda node: fetch(node, node.again))
    results = {
        node.source.index: together(node, *parts)
        for node, *parts in zip(nodes, first, again, strict=True)
    }
    for node in nodes:
        node.channel.connection.close()
    return [
        Pulled(source, error=answer)
        if isinstance(answer, OrchestratorError)
        else results[source.index]
        for source, answer in zip(sources, answers, strict=True)
    ]


def ask(transport: Transport, source: Source) -> Listed:
    """Reach a node, and ask it what there is to fetch."""
    connection = transport.connect(transport.config.of_node(source.login))
    try:
        channel = open_channel(connection, source.login, transport.timeout)
        listing = channel.ask(source.question, LIST_SECONDS)
    except BaseException:
        connection.close()
        raise
    files = [file for file in listing.files if plain(file.path)]
    # The manifest last: a checkpoint that is being fetched is not taken for a whole one.
    files.sort(key=lambda file: (file.path.endswith(f"/{MANIFEST}"), file.path))
    return Listed(source, channel, listing.place, tuple(files), left_out=listing.left_out)


def shared_out(nodes: Sequence[Listed]) -> list[Listed]:
    """Let the first node that has a file provide it, where several go into one directory.

    A checkpoint is taken from one node as a whole: files of two do not belong together.
    """
    owners: dict[tuple[Folder, str], int] = {}
    shares = []
    for node in nodes:
        source = node.source
        first, again, left = [], [], set()
        for file in node.first:
            step = STEP.match(file.path)
            unit = step[1] if step else file.path
            owner = owners.setdefault((source.into, unit), source.index)
            if owner == source.index or (file.kind == "directory" and not step):
                first.append(file)
            elif step:
                left.add(f"{unit} (that of node {owner} is taken)")
            else:
                again.append(file)
        left_out = (*node.left_out, *sorted(left))
        shares.append(replace(node, first=tuple(first), again=tuple(again), left_out=left_out))
    return shares


def together(
    node: Listed, first: Fetched | OrchestratorError, again: Fetched | OrchestratorError
) -> Pulled:
    for part in (first, again):
        if isinstance(part, OrchestratorError):
            return Pulled(node.source, error=part)
    assert isinstance(first, Fetched) and isinstance(again, Fetched)
    result = Fetched(
        [*first.fetched, *again.fetched],
        first.kept + again.kept,
        first.size + again.size,
        {**first.failed, **again.failed},
        [*first.left_out, *again.left_out, *node.left_out],
    )
    return Pulled(node.source, result)
