"""Fetch files from many nodes at once: a job's outputs, or any path."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.common.errors import OrchestratorError, UsageError
from orchestrator.common.folder import Folder
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import closed_on_error, open_attending_channel
from orchestrator.head.connect.ssh_config import Login
from orchestrator.head.connect.transport import Transport
from orchestrator.head.screen.progress import ProgressBar
from orchestrator.head.transfer.fetch import Fetch, is_plain_path, ordered_answers
from orchestrator.head.transfer.tree import Moved
from orchestrator.protocol.requests.request import Request
from orchestrator.protocol.requests.transfer import (
    PIECE_BYTES,
    FilePiece,
    OutputFile,
    OutputFiles,
    Outputs,
    ReadFile,
)
from orchestrator.protocol.timing import FILES_ANSWER_SECONDS
from orchestrator.records import checkpoint_manifest, checkpoint_parts
from orchestrator.records.checkpoint_parts import Holding

log = logging.getLogger(__name__)

STEP = re.compile(r"(checkpoints/step_[0-9]+)(?:/(.+))?")
MOST_MANIFEST_BYTES = 64 << 20
# The index of this machine among the nodes.
HERE = -1


@dataclass(frozen=True)
class PullSource:
    """A node, the request for its list of files, and the local directory for them."""

    index: int
    name: str
    login: Login
    question: Request[OutputFiles]
    into: Folder
    # True if files of the node replace local files of the same names.
    replace: bool


@dataclass
class PulledNode:
    """A node that has listed its files, and those that it provides in each of two rounds."""

    source: PullSource
    channel: NodeChannel
    listing: OutputFiles
    # The manifests of checkpoints, by directory.
    manifests: Mapping[str, bytes] = field(default_factory=dict)
    first: list[OutputFile] = field(default_factory=list)
    # Manifests, which follow their files, and files to compare with another node's.
    then: list[OutputFile] = field(default_factory=list)
    # The reasons why checkpoints cannot be completed from these nodes, by directory.
    short: dict[str, str] = field(default_factory=dict)


def pull_sources(
    transport: Transport, sources: Sequence[PullSource], progress: ProgressBar, *, dry_run: bool
) -> list[Moved]:
    """Fetch from all nodes at once; return the result of each in their order."""
    asked = fleet.map_parallel(sources, lambda source: ask(transport, source))
    nodes = [answer for answer in asked if isinstance(answer, PulledNode)]
    with contextlib.ExitStack() as opened:
        for node in nodes:
            opened.callback(node.channel.connection.close)
        for folder in dict.fromkeys(node.source.into for node in nodes):
            share_out([node for node in nodes if node.source.into is folder])
        progress.size = sum(file.size for node in nodes for file in (*node.first, *node.then))
        progress.nodes = len(nodes)
        fetched: Iterator[Moved | OrchestratorError]
        if dry_run:
            fetched = iter([Moved(files=[f.path for f in (*n.first, *n.then)]) for n in nodes])
        else:
            fetched = iter(fetch(nodes, progress))
    moved = []
    for source, answer in zip(sources, asked, strict=True):
        result = next(fetched) if isinstance(answer, PulledNode) else answer
        if isinstance(result, OrchestratorError):
            result = Moved(error=result)
        elif isinstance(answer, PulledNode):
            result.failed |= answer.short
            result.left_out += answer.listing.left_out
        moved.append(
            replace(result, node=source.index, name=source.name, into=str(source.into.root))
        )
    return moved


def ask(transport: Transport, source: PullSource) -> PulledNode:
    """Connect to a node, and return its list of files and its checkpoint manifests."""
    channel = open_attending_channel(transport, source.login)
    with closed_on_error(channel):
        listing = channel.ask(source.question, FILES_ANSWER_SECONDS)
    manifests = {
        file.path.rpartition("/")[0]: read_manifest(channel, listing.place, file)
        for file in listing.files
        if isinstance(source.question, Outputs) and is_manifest(file.path)
    }
    log.debug("%s: lists %d files", source.name, len(listing.files))
    return PulledNode(source, channel, listing, manifests)


def read_manifest(channel: NodeChannel, place: str, file: OutputFile) -> bytes:
    pieces = range(0, min(file.size, MOST_MANIFEST_BYTES), PIECE_BYTES)
    requests = (ReadFile(place=place, path=file.path, offset=at) for at in pieces)
    found = ordered_answers(channel, requests)
    return b"".join(answer.data for answer in found if isinstance(answer, FilePiece))


def fetch(nodes: Sequence[PulledNode], progress: ProgressBar) -> list[Moved | OrchestratorError]:
    """Fetch the first round of files from all nodes, then the second."""
    fetches = [
        Fetch(
            node.channel,
            node.listing.place,
            node.source.into,
            label=f"node{node.source.index}",
            replace=lambda _, node=node: node.source.replace,  # type: ignore[misc]
            progress=progress.add,
        )
        for node in nodes
    ]

    def fetch_first(at: int) -> None:
        make_place(nodes[at].source.into)
        fetches[at].go(nodes[at].first)
        progress.node_done()

    def fetch_then(at: int) -> Moved:
        if isinstance(error := first[at], OrchestratorError):
            raise error
        return fetches[at].go(nodes[at].then)

    first = fleet.map_parallel(range(len(nodes)), fetch_first)
    return fleet.map_parallel(range(len(nodes)), fetch_then)


def make_place(folder: Folder) -> None:
    """Create the directory for fetched files; raise UsageError if it cannot be created."""
    try:
        folder.make()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(
            f"the directory {folder.root} cannot be made here: {reason}",
            "name a DST that is not a file, and where you may write",
        ) from None


# -- which node gives which file --------------------------------------------------------------


def share_out(nodes: Sequence[PulledNode]) -> None:
    """Assign each file to the first node that has it, as all go into one directory.

    Files of a checkpoint come from the nodes that have them, and the manifest comes last: so a
    partly fetched checkpoint is not taken for a complete one.
    """
    givers, nodes[0].short = checkpoint_sources(nodes)
    owners: dict[str, int] = {}
    for node in nodes:
        for file in filter(lambda file: is_plain_path(file.path), node.listing.files):
            of_step = node.manifests and STEP.fullmatch(file.path)
            if of_step and givers.get(file.path) != node.source.index:
                continue
            owner = owners.setdefault(file.path, node.source.index)
            later = is_manifest(file.path) if of_step else owner != node.source.index
            (node.then if later and file.kind != "directory" else node.first).append(file)


def is_manifest(path: str) -> bool:
    match = STEP.fullmatch(path)
    return match is not None and match[2] == checkpoint_manifest.NAME


def checkpoint_sources(nodes: Sequence[PulledNode]) -> tuple[dict[str, int], dict[str, str]]:
    """Return the node that provides each checkpoint file, and why checkpoints are incomplete."""
    found: dict[str, list[Holding]] = {}
    givers, short = dict[str, int](), dict[str, str]()
    for node in nodes:
        sizes = {file.path: file.size for file in node.listing.files if file.kind == "file"}
        for directory, text in node.manifests.items():
            try:
                holding = holding_of(node.source.index, directory, text, sizes)
                found.setdefault(directory, []).append(holding)
            except (ValueError, RecursionError) as error:
                short[directory] = f"its manifest {error}"
    for directory, holdings in found.items():
        candidates = checkpoint_parts.list_candidates(holdings)
        candidate = next((each for each in candidates if each.whole), None)
        if candidate is None:
            short[directory] = candidates[0].shortage()
            continue
        short.pop(directory, None)
        version = candidate.version_for(HERE)
        for each in checkpoint_parts.plan_deliveries(candidate, {HERE: version[0].files}):
            givers[f"{directory}/{each.name}"] = each.source
        givers[f"{directory}/{checkpoint_manifest.NAME}"] = version[0].node
    return givers, dict(sorted(short.items()))


def holding_of(node: int, directory: str, text: bytes, sizes: Mapping[str, int]) -> Holding:
    """Return the files that a node has of the checkpoint in one of its directories."""
    manifest = checkpoint_manifest.parse_manifest(text)
    files = manifest.files
    return Holding(
        node=node,
        step=manifest.step,
        save=manifest.save,
        created=manifest.created,
        manifest=hashlib.sha256(text).hexdigest(),
        files=files,
        here=frozenset(n for n in files if sizes.get(f"{directory}/{n}") == files[n].size),
        hosts=manifest.hosts,
    )
