"""Fetch files from many nodes at once: what a job left there, or any path."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from orchestrator.common.errors import OrchestratorError, UsageError
from orchestrator.common.folder import Folder, hidden
from orchestrator.common.text import size
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import attending, kept_if_well
from orchestrator.head.connect.ssh_config import Login
from orchestrator.head.connect.transport import Transport
from orchestrator.head.screen.progress import Progress
from orchestrator.head.transfer.fetch import gathered
from orchestrator.head.transfer.fetch.fetch import Fetch, plain
from orchestrator.head.transfer.fetch.gathered import Gathering
from orchestrator.head.transfer.peer import Moved
from orchestrator.protocol.requests.request import Request
from orchestrator.protocol.requests.transfer import Output, OutputFile, OutputFiles, Outputs

log = logging.getLogger(__name__)

LIST_SECONDS = 600.0
LARGEST_MANIFEST_BYTES = 64 << 20

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

    @property
    def label(self) -> str:
        return f"node{self.index}"


@dataclass(frozen=True)
class Listed:
    """A node that has answered what it has."""

    source: Source
    channel: NodeChannel
    place: str
    first: tuple[OutputFile, ...]
    again: tuple[OutputFile, ...] = ()  # what an earlier node has, too: to be compared with that
    left_out: tuple[str, ...] = ()
    manifests: Mapping[str, bytes] = field(default_factory=dict)  # of checkpoints
    short: Mapping[str, str] = field(default_factory=dict)  # why none of the nodes can give them


def pull(
    transport: Transport, sources: Sequence[Source], progress: Progress, *, dry_run: bool
) -> list[Moved]:
    """Fetch from all nodes at once, and return in their order what came."""
    answers = fleet.everywhere(sources, lambda source: ask(transport, source))
    listed = [answer for answer in answers if isinstance(answer, Listed)]

    def fetch(
        node: Listed, files: Sequence[OutputFile], done: Callable[[], None] = lambda: None
    ) -> Moved:
        if dry_run:
            return Moved(files=[file.path for file in files])
        make_place(node.source.into)
        moved = Fetch(
            *(node.channel, node.place, node.source.into),
            label=node.source.label,
            replace=lambda _: node.source.replace,
            progress=progress.add,
        ).go(files)
        done()
        return moved

    with contextlib.ExitStack() as opened:
        for node in listed:
            opened.callback(node.channel.connection.close)
        nodes = shared_out(listed)
        progress.size = sum(file.size for node in nodes for file in (*node.first, *node.again))
        if not dry_run:
            check_room(nodes)
        progress.nodes = len(nodes)
        first = fleet.everywhere(nodes, lambda node: fetch(node, node.first, progress.node_done))
        again = fleet.everywhere(nodes, lambda node: fetch(node, node.again))
    moved = {
        node.source.index: together(node, *parts)
        for node, *parts in zip(nodes, first, again, strict=True)
    }
    for source, answer in zip(sources, answers, strict=True):
        if isinstance(answer, OrchestratorError):
            moved[source.index] = Moved(error=answer)
    return [
        replace(
            moved[source.index], node=source.index, name=source.name, into=str(source.into.root)
        )
        for source in sources
    ]


def check_room(nodes: Sequence[Listed]) -> None:
    """Refuse what has no room on the disks that it is for, before any of it comes."""
    needs: dict[int, int] = {}
    places: dict[int, Path] = {}
    for node in nodes:
        root = node.source.into.root.absolute()
        try:
            place = next(each for each in (root, *root.parents) if each.exists())
            disk = place.stat().st_dev
        except OSError:
            continue  # what it is for tells why
        needs[disk] = needs.get(disk, 0) + sum(lacking(node, file) for file in node.first)
        places[disk] = place
    for disk, need in needs.items():
        if (free := shutil.disk_usage(places[disk]).free) < need:
            raise UsageError(
                f"{size(need)} are to come, and the disk of {places[disk]} has {size(free)} free",
                "make room there, or name a directory with room: orchestrator pull WHAT DST",
            )


def lacking(node: Listed, file: OutputFile) -> int:
    """Return how many bytes of a file are not here, by its size and that of a broken fetch."""
    if file.kind != "file":
        return 0
    path = node.source.into.root / file.path
    have = 0
    for known in (path, path.with_name(hidden(node.source.label, path.name))):
        with contextlib.suppress(OSError):
            have = max(have, known.lstat().st_size)
    return max(0, file.size - have)


def make_place(folder: Folder) -> None:
    """Make the directory that files go into, or say why it cannot be made."""
    try:
        folder.make()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(
            f"the directory {folder.root} cannot be made here: {reason}",
            "name a DST that is not a file, and where you may write",
        ) from None


def ask(transport: Transport, source: Source) -> Listed:
    """Reach a node, and ask it what there is to fetch."""
    channel = attending(transport, source.login)
    with kept_if_well(channel):
        listing = channel.ask(source.question, LIST_SECONDS)
    files = [file for file in listing.files if plain(file.path)]
    manifests = {
        file.path.rpartition("/")[0]: content(channel, listing.place, file)
        for file in files
        if isinstance(source.question, Outputs) and gathered.is_manifest(file.path)
    }
    log.debug("%s: lists %d files", source.name, len(files))
    left_out = listing.left_out
    return Listed(source, channel, listing.place, tuple(files), (), left_out, manifests)


def content(channel: NodeChannel, place: str, file: OutputFile) -> bytes:
    """Read a small file of a node."""
    data = b""
    while len(data) < min(file.size, LARGEST_MANIFEST_BYTES):
        request = Output(place=place, path=file.path, offset=len(data))
        piece = channel.ask(request, LIST_SECONDS).data
        if not piece:
            break  # it was pruned meanwhile
        data += piece
    return data


def shared_out(nodes: Sequence[Listed]) -> list[Listed]:
    """Let the first node that has a file provide it, where several go into one directory.

    Files of a checkpoint come from whoever has them, and the manifest last: one that is being
    fetched is not taken for a whole one.
    """
    gatherings: dict[Folder, Gathering] = {}
    for folder in dict.fromkeys(node.source.into for node in nodes):
        offers = [
            gathered.Offered(node.source.index, node.first, node.manifests)
            for node in nodes
            if node.source.into is folder
        ]
        gatherings[folder] = gathered.gather(offers, folder.root)
    owners: dict[tuple[Folder, str], int] = {}
    shares = []
    for node in nodes:
        source, gathering = node.source, gatherings[node.source.into]
        first: list[OutputFile] = []
        again: list[OutputFile] = []
        for file in node.first:
            step = gathered.STEP.fullmatch(file.path) if node.manifests else None
            giver = gathering.givers.get(file.path)
            owner = owners.setdefault((source.into, file.path), source.index)
            if step and (step[2] is None or giver != source.index):
                continue
            if step:
                (again if gathered.is_manifest(file.path) else first).append(file)
            elif owner == source.index or file.kind == "directory":
                first.append(file)
            else:
                again.append(file)
        short = {step: gathering.short.pop(step) for step in sorted(gathering.short)}
        shares.append(replace(node, first=tuple(first), again=tuple(again), short=short))
    return shares


def together(node: Listed, *parts: Moved | OrchestratorError) -> Moved:
    """Add up what came first and then."""
    whole = Moved(left_out=list(node.left_out), failed=dict(node.short))
    for part in parts:
        if isinstance(part, OrchestratorError):
            return Moved(error=part)
        whole.files += part.files
        whole.kept += part.kept
        whole.size += part.size
        whole.failed |= part.failed
        whole.left_out[:0] = part.left_out
    return whole
