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
from orchestrator.head.connect.reach import temporary_channel
from orchestrator.head.connect.transport import Transport
from orchestrator.head.nodes.node_list import NumberedNode
from orchestrator.head.screen.progress import ProgressBar
from orchestrator.head.transfer.send import send_to_all
from orchestrator.head.transfer.tree import Moved, Tree, entry_of
from orchestrator.node.transfer.listing import Listing
from orchestrator.protocol.manifest import MOST_ENTRIES
from orchestrator.protocol.requests.transfer import RemoteDir


@dataclass(frozen=True)
class Cargo:
    """The files to send, and the directory for them on each node."""

    tree: Tree
    directory: str
    left_out: tuple[str, ...] = ()


def load_cargo(source: Path, destination: str | None) -> Cargo:
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
            f"{destination} is relative, and nodes have no current directory",
            "write it in full, beginning with / or ~/",
        )
    try:
        status = source.stat()
        if stat.S_ISDIR(status.st_mode):
            # An unreadable directory is an error, not an empty one.
            os.listdir(source)
    except OSError as error:
        raise UsageError(f"{source}: {(error.strerror or str(error)).lower()}") from None
    if stat.S_ISDIR(status.st_mode):
        listing = Listing(str(source), most=MOST_ENTRIES)
        listing.walk()
        tree = Tree.of(os.fsencode(source), map(entry_of, listing.files))
        return Cargo(tree, where, tuple(listing.left_out))
    listing = Listing(str(source.parent))
    listing.add(name, status)
    if not listing.files:
        raise UsageError(f"{source} is neither a file nor a directory")
    (file,) = map(entry_of, listing.files)
    there = file._replace(path=os.fsencode(Path(where).name))
    tree = Tree.of(os.fsencode(source.parent), [there], names={there.path: file.path})
    return Cargo(tree, str(Path(where).parent))


def push_cargo(
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
        connected = fleet.map_parallel(
            targets, lambda target: opened.enter_context(temporary_channel(transport, target.node))
        )
        there = [channel for channel in connected if isinstance(channel, NodeChannel)]
        into = [RemoteDir(directory=cargo.directory)] * len(there)
        results = iter(send_to_all(there, into, cargo.tree, progress.add, dry_run=dry_run))
        sent = [next(results) if isinstance(each, NodeChannel) else each for each in connected]
    moved = [Moved(error=each) if isinstance(each, OrchestratorError) else each for each in sent]
    return [
        replace(each, node=target.index, name=target.node.name, into=cargo.directory)
        for target, each in zip(targets, moved, strict=True)
    ]
