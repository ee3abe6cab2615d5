"""Fetches what ranks wrote on nodes that do not share the head's disk."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from orchestrator import text
from orchestrator.folder import Folder
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.outputs.fetch import Fetch
from orchestrator.head.outputs.growing import GROWS
from orchestrator.protocol.messages import Outputs

ANSWER_SECONDS = 20.0
RESULTS = "results/"  # of Cluster.run: somebody waits for them, of whatever size
LARGEST = 64 << 20  # bytes of one file; what is larger stays where it is, and is named


def bring(
    channel: NodeChannel,
    job: str,
    node: int,
    outputs: Path,
    grown: Container[str] = (),
    since: tuple[float, float] = (0.0, 0.0),
) -> str:
    """Fetch every file that is not here yet; name what had to stay there.

    Of those that have grown here while the job ran, what the node has is right; and of those that
    came with an attempt before, if this one has changed them (see Fetch).
    """
    listing = channel.ask(Outputs(job=job, node=node), ANSWER_SECONDS)
    stays, taken = [], []
    for file in listing.files:
        whole = file.path.startswith(RESULTS) or GROWS.fullmatch(file.path)
        if file.size > LARGEST and not whole:
            stays.append(f"{file.path} ({text.size(file.size)})")
        elif file.kind == "file":
            taken.append(file)
    folder = Folder(outputs, private=True)
    for replace in (True, False):
        some = [file for file in taken if (file.path in grown) == replace]
        fetch = Fetch(
            channel, listing.place, folder, label=f"node{node}", replace=replace, since=since
        )
        stays += [f"{path} ({why})" for path, why in fetch.go(some).failed.items()]
    if listing.checkpoints:
        stays.append("its checkpoints")
    return f"{', '.join(stays)} stay on the node, in {listing.place}" if stays else ""
