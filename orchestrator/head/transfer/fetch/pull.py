"""Fetch files from many nodes at once: what a job left there, or any path."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

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
from orchestrator.head.transfer.fetch.fetch import Fetch, plain, read_bytes
from orchestrator.head.transfer.peer import Moved
from orchestrator.protocol.requests.request import Request
from orchestrator.protocol.requests.transfer import OutputFile, OutputFiles, Outputs
from orchestrator.protocol.timing import FILES_ANSWER_SECONDS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PullSource:
    """A node, what is asked of it, and where its files go."""

    index: int
    name: str
    login: Login
    question: Request[OutputFiles]
    into: Folder
    # Files of the node take the place of what has their names here.
    replace: bool

    @property
    def label(self) -> str:
        return f"node{self.index}"


@dataclass
class PulledNode:
    """A node that has answered what it has, and which of that it gives in which go."""

    source: PullSource
    channel: NodeChannel
    place: str
    files: tuple[OutputFile, ...]
    left_out: tuple[str, ...] = ()
    # Of checkpoints, by their directories.
    manifests: Mapping[str, bytes] = field(default_factory=dict)
    first: list[OutputFile] = field(default_factory=list)
    # Manifests, whose files are here by then, and files that are to be compared with another's.
    then: list[OutputFile] = field(default_factory=list)
    # Checkpoints that the nodes cannot give together, and why.
    short: dict[str, str] = field(default_factory=dict)


def pull(
    transport: Transport, sources: Sequence[PullSource], progress: Progress, *, dry_run: bool
) -> list[Moved]:
    """Fetch from all nodes at once, and return in their order what came."""
    answers = fleet.everywhere(sources, lambda source: ask(transport, source))
    nodes = [answer for answer in answers if isinstance(answer, PulledNode)]
    with contextlib.ExitStack() as opened:
        for node in nodes:
            opened.callback(node.channel.connection.close)
        share_out(nodes)
        progress.size = sum(file.size for node in nodes for file in (*node.first, *node.then))
        progress.nodes = len(nodes)
        fetched: Iterator[Moved | OrchestratorError]
        if not dry_run:
            check_room(nodes)
            fetched = iter(fetch(nodes, progress))
        else:
            fetched = iter(map(to_come, nodes))
    moved = []
    for source, answer in zip(sources, answers, strict=True):
        result = next(fetched) if isinstance(answer, PulledNode) else answer
        if isinstance(result, OrchestratorError):
            result = Moved(error=result)
        moved.append(
            replace(result, node=source.index, name=source.name, into=str(source.into.root))
        )
    return moved


def to_come(node: PulledNode) -> Moved:
    """Return what would come from a node."""
    files = [file.path for file in (*node.first, *node.then)]
    return Moved(files=files, failed=node.short, left_out=list(node.left_out))


def fetch(nodes: Sequence[PulledNode], progress: Progress) -> list[Moved | OrchestratorError]:
    """Fetch what each node gives first, and then the rest."""
    fetches = [
        Fetch(
            node.channel,
            node.place,
            node.source.into,
            label=node.source.label,
            replace=lambda _, node=node: node.source.replace,  # type: ignore[misc]
            progress=progress.add,
        )
        for node in nodes
    ]

    def fetch_first(at: int) -> None:
        make_place(nodes[at].source.into)
        fetches[at].go(nodes[at].first)
        progress.node_done()

    first = fleet.everywhere(range(len(nodes)), fetch_first)

    def fetch_then(at: int) -> Moved:
        if isinstance(error := first[at], OrchestratorError):
            raise error
        moved = fetches[at].go(nodes[at].then)
        moved.failed |= nodes[at].short
        moved.left_out += nodes[at].left_out
        return moved

    return fleet.everywhere(range(len(nodes)), fetch_then)


def check_room(nodes: Sequence[PulledNode]) -> None:
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


def lacking(node: PulledNode, file: OutputFile) -> int:
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


def ask(transport: Transport, source: PullSource) -> PulledNode:
    """Reach a node, and ask it what there is to fetch."""
    channel = attending(transport, source.login)
    with kept_if_well(channel):
        listing = channel.ask(source.question, FILES_ANSWER_SECONDS)
    files = [file for file in listing.files if plain(file.path)]
    manifests = {
        file.path.rpartition("/")[0]: read_bytes(channel, listing.place, file.path, file.size)
        for file in files
        if isinstance(source.question, Outputs) and gathered.is_manifest(file.path)
    }
    log.debug("%s: lists %d files", source.name, len(files))
    left_out = listing.left_out
    return PulledNode(source, channel, listing.place, tuple(files), left_out, manifests)


def share_out(nodes: Sequence[PulledNode]) -> None:
    """Let the first node that has a file provide it, where several go into one directory.

    Files of a checkpoint come from the nodes that have them, and the manifest last: one that is
    being fetched is not taken for a whole one.
    """
    for folder in dict.fromkeys(node.source.into for node in nodes):
        of_folder = [node for node in nodes if node.source.into is folder]
        offers = [
            gathered.NodeOffer(node.source.index, node.files, node.manifests) for node in of_folder
        ]
        gathering = gathered.gather(offers, folder.root)
        of_folder[0].short = dict(sorted(gathering.short.items()))
        owners: dict[str, int] = {}
        for node in of_folder:
            for file in node.files:
                of_step = node.manifests and gathered.STEP.fullmatch(file.path)
                if of_step and gathering.givers.get(file.path) != node.source.index:
                    continue
                owner = owners.setdefault(file.path, node.source.index)
                later = gathered.is_manifest(file.path) if of_step else owner != node.source.index
                (node.then if later and file.kind != "directory" else node.first).append(file)
