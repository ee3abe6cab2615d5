"""Fetches what ranks wrote on nodes that do not share the head's disk."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from orchestrator.common import text
from orchestrator.common.folder import Folder
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.outputs.beside import Beside, is_much
from orchestrator.head.outputs.fetch import Fetch
from orchestrator.head.outputs.growing import GROWS, GrowingFiles
from orchestrator.protocol.requests.transfer import OutputFile, Outputs

ANSWER_SECONDS = 20.0
LOOK_SECONDS = 5.0
RESULTS = "results/"  # of Cluster.run: somebody waits for them, of whatever size
LARGEST = 64 << 20  # bytes of one file; what is larger stays where it is, and is named


def bring(
    channel: NodeChannel,
    job: str,
    node: int,
    outputs: Path,
    growing: GrowingFiles | None = None,
    since: tuple[float, float] = (0.0, 0.0),
) -> tuple[list[str], Beside | None]:
    """Fetch every file that is not here yet; name what had to stay there, and what is no output.

    Of those that have grown here while the job ran, what the node has is right; but metrics that an
    earlier attempt began stay as they were joined. Of those that came with an attempt before, the
    node's are right if this one has changed them (see Fetch).
    """
    if growing is not None:
        growing.finish(channel, ANSWER_SECONDS)
    grown = growing.ours if growing is not None else {}
    joined = growing.joined if growing is not None else set[str]()
    listing = channel.ask(Outputs(job=job, node=node, beside=LOOK_SECONDS), ANSWER_SECONDS)
    beside = [file for file in listing.files if file.place]
    much = is_much(beside)
    places = {file.path: file.place or listing.place for file in listing.files}
    stays: dict[str, list[str]] = defaultdict(list)  # place -> what stays there
    taken: list[OutputFile] = []
    fetched: set[str] = set()
    for file in listing.files:
        if (file.place and much) or file.path in joined:
            continue
        whole = file.path.startswith(RESULTS) or GROWS.fullmatch(file.path)
        if file.size > LARGEST and not whole:
            stays[places[file.path]].append(f"{file.path} ({text.size(file.size)})")
        elif file.kind == "file":
            taken.append(file)
    folder = Folder(outputs, private=True)
    for replace in (True, False):
        some = [file for file in taken if (file.path in grown) == replace]
        fetch = Fetch(
            channel, listing.place, folder, label=f"node{node}", replace=replace, since=since
        )
        result = fetch.go(some)
        fetched.update(result.fetched)
        for path, why in result.failed.items():
            stays[places[path]].append(f"{path} ({why})")
    if listing.checkpoints:
        stays[listing.place].append("its checkpoints")
    news = much or any(file.path in fetched for file in beside)
    said = [f"{', '.join(each)} stay on the node, in {place}" for place, each in stays.items()]
    if listing.left_out:
        said.append(f"left out there: {', '.join(listing.left_out)}")
    return said, Beside(beside, has_come=not much) if news else None
