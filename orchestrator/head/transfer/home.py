"""Fetch files that ranks wrote on nodes that do not share the head's disk; report their place."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.hosts import join_names
from orchestrator.common.text import format_bytes, plural
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.transfer.fetch import Fetch
from orchestrator.head.transfer.growing import GROWS, GrowingFiles
from orchestrator.protocol.requests.transfer import OutputFile
from orchestrator.protocol.timing import ANSWER_SECONDS

log = logging.getLogger(__name__)

# The time limit of a node's search for files that were written beside the code.
SEARCH_SECONDS = 5.0
# The results of Cluster.run are fetched at any size, as its caller waits for them.
RESULTS = "results/"
# A larger file stays on the node, and its name is printed.
LARGEST_BYTES = 64 << 20
# More bytes or files beside a node's code are not fetched without a request.
MOST_BYTES, MOST_FILES = 64 << 20, 1000
NAMED = 3


def bring_outputs(
    channel: NodeChannel, growing: GrowingFiles, since: tuple[float, float] = (0.0, 0.0)
) -> tuple[list[str], CodeOutputs | None]:
    """Fetch every output that is not here yet; return messages on files that stay on the node.

    The second result has the files that were written beside the code.

    The node's version replaces files that have grown here while the job ran. Files that were
    fetched after an earlier attempt are replaced if this attempt has changed them (see Fetch).
    """
    listing = channel.ask(growing.listing.replace(beside=SEARCH_SECONDS), ANSWER_SECONDS)
    growing.finish(channel, listing, ANSWER_SECONDS)
    beside_code = [file for file in listing.files if file.place]
    much = len(beside_code) > MOST_FILES or sum(file.size for file in beside_code) > MOST_BYTES
    # The files that stay on the node, by their directory.
    stays: dict[str, list[str]] = defaultdict(list)
    taken: list[OutputFile] = []
    for file in listing.files:
        if (file.place and much) or has_grown(growing, file):
            continue
        whole = file.path.startswith(RESULTS) or GROWS.fullmatch(file.path)
        if file.size > LARGEST_BYTES and not whole:
            stays[file.place or listing.place].append(f"{file.path} ({format_bytes(file.size)})")
        elif file.kind == "file":
            taken.append(file)
    fetch = Fetch(
        channel,
        listing.place,
        growing.folder,
        label=f"node{growing.node.index}",
        replace=growing.grown.__contains__,
        since=since,
    )
    log.debug("%s: fetches %d files of %d", fetch.label, len(taken), len(listing.files))
    result = fetch.go(taken)
    places = {file.path: file.place or listing.place for file in taken}
    for path, reason in result.failed.items():
        stays[places[path]].append(f"{path} ({reason})")
    if much:
        stays[listing.workdir].append(f"{how_much(beside_code)} beside the code")
    if listing.checkpoints:
        stays[listing.place].append("its checkpoints")
    said = [f"{', '.join(each)} stay on the node, in {place}" for place, each in stays.items()]
    said += [f"left out there: {', '.join(listing.left_out)}"] * bool(listing.left_out)
    over = [file.target for file in beside_code if file.target]
    said += [f"the program wrote over the node's own {join_names(over)}"] * bool(over)
    new_files = not much and any(file.path in set(result.files) for file in beside_code)
    with_code = CodeOutputs(beside_code, listing.workdir) if new_files else None
    return said, with_code


def has_grown(growing: GrowingFiles, file: OutputFile) -> bool:
    """Return True for a file that has grown here to its full size; set its time to the node's."""
    path = growing.outputs / file.path
    if file.path not in growing.grown or path.lstat().st_size != file.size:
        return False
    os.utime(path, ns=(file.changed, file.changed), follow_symlinks=False)
    return True


# -- files that a program wrote beside its code, on nodes with a snapshot -------------------------


@dataclass(frozen=True)
class CodeOutputs:
    """The files that the ranks of a node wrote beside their code."""

    files: Sequence[OutputFile]
    workdir: str

    @property
    def names(self) -> list[str]:
        """Return the first names below the program's directory, or those above it."""
        paths = [os.path.join(file.place, file.path) for file in self.files]
        parts = [os.path.relpath(path, self.workdir).split("/") for path in paths]
        return ["/".join(each[: each.count("..") + 1]) for each in parts]


def how_much(files: Sequence[OutputFile]) -> str:
    return f"{plural(len(files), 'file')}, {format_bytes(sum(file.size for file in files))}"


def where_files_are(found: Mapping[int, CodeOutputs], home: Path) -> list[str]:
    """Return a message on where files beside the code are now, and how a next launch finds them."""
    if not found:
        return []
    names = sorted({name for outputs in found.values() for name in outputs.names})
    named = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" * (len(names) > NAMED))
    where = f"node {min(found)}" if len(found) == 1 else plural(len(found), "node")
    much = how_much([file for outputs in found.values() for file in outputs.files])
    return [
        f"the program wrote {named} beside its code on {where} ({much}): now in {home};"
        " for the next launch to find a directory there: --set sync.outputs=[DIRECTORY]"
    ]
