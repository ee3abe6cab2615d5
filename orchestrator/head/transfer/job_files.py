"""Before each attempt, copy files that the job's master wrote to nodes that lack them.

The master's file wins; nothing is merged or deleted: see docs/guide/shared_files.md. A file that
cannot be copied ends the attempt before it begins, as some ranks would start from an older state.
The bytes pass through this machine, from the master's channel to the others'.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError
from orchestrator.common.hosts import join_names
from orchestrator.common.text import format_bytes, format_duration
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import Declined, NodeChannel
from orchestrator.head.events import of_launch
from orchestrator.head.screen.events import tell
from orchestrator.head.screen.output import printable_text
from orchestrator.head.screen.progress import ProgressBar
from orchestrator.head.transfer.fetch import ordered_answers, stays_inside
from orchestrator.head.transfer.send import Reader, Seen, send_to_all
from orchestrator.head.transfer.tree import Moved, Tree, entry_of
from orchestrator.node.transfer.job_files import OUTPUTS
from orchestrator.node.transfer.listing import Listing
from orchestrator.protocol.manifest import ManifestEntry
from orchestrator.protocol.requests.request import NO_PART, Part
from orchestrator.protocol.requests.transfer import (
    OF_JOB,
    PIECE_BYTES,
    AskJobFiles,
    JobFiles,
    ReadFile,
    RemoteDir,
)
from orchestrator.protocol.timing import ANSWER_SECONDS
from orchestrator.records.experiment import NodeRecord
from orchestrator.records.metrics import trainers

APART = "its ranks would start from the beginning, or from an older state, beside those that go on"
MEND = (
    "mend that, and launch again; what is in a directory whose name begins with a dot is left out:"
    " no rank reads it again"
)
TOO_MANY = (
    "below the job's directories there are over 20,000 new files, or too many to look at in 5 s"
)


@dataclass(eq=False)
class JobPeer:
    """A node of a job with its channel, and its part of the job."""

    name: str
    channel: NodeChannel
    part: Part
    # True if it sees the head's experiment, on a shared disk.
    shared: bool = False


def bring_job_files(
    peers: Sequence[JobPeer],
    last: Sequence[str],
    reach: Callable[[str], JobPeer | None],
    outputs: Sequence[str],
    stopped: Callable[[], None],
) -> None:
    """Copy to the nodes of the next attempt the files of the master that they lack.

    The master is the first of the `last` attempt's nodes that still has its part of the job.
    reach() opens a channel to a node that the next attempt does not use. stopped() raises an error
    once the user has stopped the job. Raises CheckFailed for a file that cannot be copied.
    """
    there = {peer.name: peer for peer in peers}
    for name in last:
        master = there.get(name) or reach(name)
        if master is None:
            continue
        job, part = master.part
        try:
            found = master.channel.ask(
                AskJobFiles(job=job, part=part, outputs=tuple(outputs)), ANSWER_SECONDS
            )
        except NodeError as error:
            if (isinstance(error, Declined) and error.kind == NO_PART) or name not in there:
                continue
            raise CheckFailed(f"{name}: {error.what}", error.fix, names=[name]) from error
        if name != last[0]:
            tell(of_launch.MasterLost(last[0], name))
        takers = [peer for peer in peers if peer is not master]
        if takers and not found.whole:
            if not all(peer.shared for peer in (master, *takers)):
                raise CheckFailed(f"{name}: {TOO_MANY}: {APART}", f"keep data elsewhere; {MEND}")
            tell(of_launch.TooManyFiles(name))
        if takers:
            bring_directories(master, found, takers, tuple(outputs), stopped)
        return
    tell(of_launch.NothingCarried(f"{join_names(last)} {'is' if len(last) == 1 else 'are'}"))


def bring_directories(
    master: JobPeer,
    found: JobFiles,
    takers: Sequence[JobPeer],
    outputs: tuple[str, ...],
    stopped: Callable[[], None],
) -> None:
    """Send the master's files in each of the job's directories to the nodes that lack them."""
    came, names, began = dict[str, int](), dict[str, None](), time.monotonic()

    def seen(size: int) -> None:
        stopped()
        progress.add(size)

    with ProgressBar("bringing what the master saved") as progress:
        for name, root in found.roots.items():
            inside = [file for file in found.files if file.place == name and stays_inside(file)]
            if not any(file.kind != "directory" for file in inside):
                continue
            tree = Tree.of(os.fsencode(root), map(entry_of, inside))
            progress.size += tree.size * len(takers)
            into = RemoteDir(kind=OF_JOB, directory=name, outputs=outputs)
            sent = give(master.name, takers, into, tree, seen, reader_of(master, tree))
            sizes = sizes_of(tree)
            for taker, each in zip(takers, sent, strict=True):
                came |= {path: sizes[path] for path in each.files}
                names |= {taker.name: None} if each.files else {}
    if came:
        what = f"{named(came)} ({format_bytes(sum(came.values()))})"
        took = format_duration(time.monotonic() - began)
        tell(of_launch.FilesCopied(join_names([*names]), what, master.name, took))


def bring_metrics(
    outputs: Path, before: Sequence[str], nodes: Sequence[NodeRecord], peers: Sequence[JobPeer]
) -> None:
    """Send each rank's metrics to its node in the next attempt, unless it ran there before.

    `before` names the node of each rank in the last attempt. A rank that goes on from a checkpoint
    keeps the lines up to it. Raises CheckFailed if a node does not get them.
    """
    known = trainers.list_metrics_files(outputs).values()

    def give_metrics(node: NodeRecord, peer: JobPeer) -> None:
        moved = [rank for rank in node.numbers if before[rank : rank + 1] != [node.name]]
        listing = Listing(str(outputs))
        for path in (paths[rank] for paths in known for rank in moved if rank in paths):
            listing.add(path.name, path.stat())
        if listing.files:
            tree = Tree.of(os.fsencode(outputs), map(entry_of, listing.files))
            give("this machine", [peer], RemoteDir(kind=OF_JOB, directory=OUTPUTS), tree)

    for error in fleet.map_parallel(
        list(zip(nodes, peers, strict=True)), lambda pair: give_metrics(*pair)
    ):
        if error is not None:
            raise error


def reader_of(master: JobPeer, tree: Tree) -> Reader:
    """Return a function that reads the files of a tree on the master's disk."""
    lock, place = threading.Lock(), os.fsdecode(tree.directory)

    def read(entry: ManifestEntry, offset: int, size: int) -> bytes:
        pieces = [
            ReadFile(
                place=place,
                path=os.fsdecode(entry.path),
                offset=at,
                size=min(PIECE_BYTES, offset + size - at),
                changed=entry.time,
            )
            for at in range(offset, offset + size, PIECE_BYTES)
        ]
        data = bytearray()
        try:
            with lock:
                for answer in ordered_answers(master.channel, pieces):
                    if isinstance(answer, Declined):
                        raise OSError(0, answer.what)
                    data += answer.data
        except NodeError as error:
            raise NodeError(error.what, error.fix, names=[master.name]) from error
        if len(data) < size:
            raise OSError(0, "it became shorter")
        return bytes(data)

    return read


def give(
    giver: str,
    takers: Sequence[JobPeer],
    into: RemoteDir,
    tree: Tree,
    seen: Seen = lambda _: None,
    read: Reader | None = None,
) -> list[Moved]:
    """Send a tree to the same directory of each taker; return the results in their order.

    Raises CheckFailed with the nodes that did not receive their files.
    """
    places = [into.replace(job=job, part=part) for job, part in (peer.part for peer in takers)]
    results = send_to_all([peer.channel for peer in takers], places, tree, seen, read=read)
    # A user's stop is the reason of what failed after it.
    seen(0)
    reasons: dict[str, str] = {}
    for taker, each in zip(takers, results, strict=True):
        if isinstance(each, OrchestratorError):
            reasons |= dict.fromkeys(each.names or (taker.name,), printable_text(each.what))
        elif each.failed:
            path, why = min(each.failed.items())
            reasons[taker.name] = f"{printable_text(path)}: {why}"
    if reasons:
        what = f"{named(sizes_of(tree))}, which {giver} has,"
        why = "; ".join(f"{name} ({reason})" for name, reason in reasons.items())
        raise CheckFailed(f"{what} did not come to {why}: {APART}", MEND, names=[*reasons])
    return [each for each in results if isinstance(each, Moved)]


def sizes_of(tree: Tree) -> dict[str, int]:
    return {os.fsdecode(entry.path): entry.size for entry in tree.entries}


def named(sizes: Mapping[str, int]) -> str:
    """Return the name of the largest of these files, and the number of the others."""
    first = printable_text(max(sizes, key=lambda path: (sizes[path], path)))
    return f"{first} and {len(sizes) - 1} more" if len(sizes) > 1 else first
