"""Send a directory or a file to many nodes at once: only files that are missing or differ."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.common.errors import EMPTY, OrchestratorError, UsageError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import open_channel
from orchestrator.head.connect.transport import Transport
from orchestrator.head.nodes.node_list import NumberedNode
from orchestrator.head.screen.progress import ProgressBar
from orchestrator.head.transfer.send import Sent, send_to_all
from orchestrator.head.transfer.tree import Moved, Tree, entry_of
from orchestrator.node.transfer.listing import Listing
from orchestrator.protocol.manifest import FILE, MOST_ENTRIES
from orchestrator.protocol.requests.transfer import RemoteDir


@dataclass(frozen=True)
class Cargo:
    """The files to send, and the directory for them on each node."""

    tree: Tree
    directory: str
    left_out: tuple[str, ...] = ()


def load(source: Path, destination: str | None) -> Cargo:
    """Return the files of `source` to send; DST is the copy's path, or with a final / its parent.

    Raises UsageError for a wrong source or destination.
    """
    source = source.absolute()
    name = source.name
    if destination == "":
        raise UsageError("DST is empty", EMPTY)
    where = destination or str(source)
    if where.endswith("/"):
        where += name
    if not (where.startswith(("/", "~/")) and Path(where).name not in ("", "~", "..")):
        raise UsageError(
            f"{destination} is relative, and nodes have no directory that it could begin in",
            "write it in full, beginning with / or ~/",
        )
    try:
        status = source.stat()
    except OSError as error:
        raise UsageError(f"{source}: {(error.strerror or str(error)).lower()}") from None
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise UsageError(f"{source} is neither a file nor a directory")
    if stat.S_ISREG(status.st_mode):
        listing = Listing(str(source.parent))
        listing.add(name, status)
        (file,) = map(entry_of, listing.files)
        there = file._replace(path=os.fsencode(Path(where).name))
        tree = Tree.of(os.fsencode(source.parent), [there], names={there.path: file.path})
        return Cargo(tree, str(Path(where).parent))
    listing = Listing(str(source), most=MOST_ENTRIES)
    try:
        os.listdir(source)
        listing.walk()
    except OSError as error:
        raise UsageError(f"{source}: {error.strerror}") from None
    tree = Tree.of(os.fsencode(source), map(entry_of, listing.files))
    return Cargo(tree, where, tuple(listing.left_out))


def push(
    transport: Transport,
    targets: Sequence[NumberedNode],
    cargo: Cargo,
    progress: ProgressBar,
    *,
    dry_run: bool,
) -> list[Moved]:
    """Send the files to all nodes at once; return the result of each in their order."""
    progress.size = cargo.tree.size * len(targets)
    with contextlib.ExitStack() as opened:

        def connect(target: NumberedNode) -> NodeChannel:
            connection = transport.connect(target.node)
            opened.callback(connection.close)
            return open_channel(connection, target.node, transport.timeout)

        connected = fleet.everywhere(targets, connect)
        there = [channel for channel in connected if isinstance(channel, NodeChannel)]
        into = [RemoteDir(directory=cargo.directory)] * len(there)
        results = iter(send_to_all(there, into, cargo.tree, progress.add, dry_run=dry_run))
        sent = [next(results) if isinstance(each, NodeChannel) else each for each in connected]
    return [
        replace(sent_by(cargo, each), node=target.index, name=target.node.name)
        for target, each in zip(targets, sent, strict=True)
    ]


def sent_by(cargo: Cargo, result: Sent | OrchestratorError) -> Moved:
    """Return the result of one node: files that were sent (or would be), kept or failed."""
    if isinstance(result, OrchestratorError):
        return Moved(into=cargo.directory, error=result)
    files = {entry.path for entry in cargo.tree.entries if entry.kind == FILE}
    return Moved(
        into=cargo.directory,
        files=list(map(os.fsdecode, result.sent)),
        kept=len(files.difference(result.sent, result.failed)),
        size=result.size,
        failed={os.fsdecode(path): reason for path, reason in result.failed.items()},
    )
