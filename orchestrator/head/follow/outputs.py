"""Fetches what ranks wrote on nodes that do not share the head's disk."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from orchestrator import files, text
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.protocol.messages import Output, OutputFile, Outputs

ANSWER_SECONDS = 20.0
RESULTS = "results/"  # of Cluster.run: somebody waits for them, of whatever size
LARGEST = 64 << 20  # bytes of one file; what is larger stays where it is, and is named


def bring(channel: NodeChannel, job: str, node: int, outputs: Path) -> str:
    """Fetch every file that is not here yet; name what had to stay there."""
    listing = channel.ask(Outputs(job=job, node=node), ANSWER_SECONDS)
    stays = []
    for file in listing.files:
        if not plain(file.path):
            continue  # no node of ours would name such a path
        if file.size > LARGEST and not file.path.startswith(RESULTS):
            stays.append(f"{file.path} ({text.size(file.size)})")
        elif not (outputs / file.path).exists():
            fetch(channel, Output(job=job, node=node, path=file.path, offset=0), file, outputs)
    if listing.checkpoints:
        stays.append("its checkpoints")
    return f"{', '.join(stays)} stay on the node, in {listing.place}" if stays else ""


def plain(path: str) -> bool:
    """Tell whether a path from a node stays below the outputs."""
    parts = PurePosixPath(path).parts
    try:
        named = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half of a character
        return False
    return named and bool(parts) and not path.startswith("/") and not {"..", "."} & set(parts)


def fetch(channel: NodeChannel, request: Output, file: OutputFile, outputs: Path) -> None:
    path = outputs / file.path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with files.replacing(path) as kept:
        while kept.tell() < file.size:
            piece = channel.ask(request.replace(offset=kept.tell()), ANSWER_SECONDS)
            if not piece.data:
                break  # it became shorter meanwhile
            kept.write(piece.data)
