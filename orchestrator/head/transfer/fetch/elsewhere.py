"""Says which places that ranks wrote to do not come home, on which nodes, and what to type."""

from __future__ import annotations

import os
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from orchestrator.common.hiding import redacted_text
from orchestrator.common.hosts import listed
from orchestrator.common.text import plural, size
from orchestrator.protocol.requests.transfer import WrittenPlace
from orchestrator.records.outcome import Elsewhere

NAMED = 8  # places, a line each


def staying(
    found: Mapping[str, Sequence[WrittenPlace]], kept: Sequence[str] = ()
) -> list[Elsewhere]:
    """Merge what nodes have answered, by name; `kept` are the directories that are to stay there.

    What this machine sees, too, is no loss: it is on a disk of both, or the node is this machine.
    """
    nodes: dict[tuple[str, str], dict[str, WrittenPlace]] = defaultdict(dict)
    for node, places in sorted(found.items()):
        for place in places:
            if place.through not in map(os.path.normpath, kept) and not is_here(place):
                nodes[place.path, place.through][node] = place
    return [
        Elsewhere(
            path=redacted_text(path),
            nodes=tuple(of),
            files=sum(place.files for place in of.values()),
            size=sum(place.size for place in of.values()),
            more=any(place.more for place in of.values()),
            through=through,
            of_workdir=all(place.of_workdir for place in of.values()),
        )
        for (path, through), of in sorted(nodes.items())
    ]


def is_here(place: WrittenPlace) -> bool:
    """Tell whether this machine sees the very same directory or file."""
    try:
        status = os.lstat(place.path)
    except (OSError, ValueError):
        return False
    inode = status.st_ino & ((1 << 62) - 1)
    return (inode, max(0, status.st_ctime_ns)) == (place.inode, place.changed)


def merged(before: Sequence[Elsewhere], found: Sequence[Elsewhere]) -> list[Elsewhere]:
    """Add what an attempt has left to what those before it have."""
    known = {place.path: place for place in before}
    for place in found:
        earlier = known.get(place.path)
        nodes = {*place.nodes, *(earlier.nodes if earlier else ())}
        known[place.path] = replace(place, nodes=tuple(sorted(nodes)))
    return [known[path] for path in sorted(known)]


def sentences(places: Sequence[Elsewhere], *, goes_on: bool = False) -> Iterator[str]:
    """Say it, a line for each place. `goes_on`: another attempt follows, perhaps on other nodes."""
    places = [place for place in places if not (goes_on and place.of_workdir)]
    for place in places[:NAMED]:
        yield sentence(place, goes_on=goes_on)
    if len(places) > NAMED:
        yield f"{plural(len(places) - NAMED, 'more place')} stay on nodes: `elsewhere` in job.json"


def sentence(place: Elsewhere, *, goes_on: bool = False) -> str:
    through = f", where {place.through} leads," if place.through else ""
    least = "at least " * place.more
    much = f"{least}{plural(place.files, 'file')}, {size(place.size)}"
    about = f"ranks wrote to {place.path}{through} on {listed(place.nodes)} ({much}), which"
    if goes_on:
        copy = f"orchestrator.distributed.copy_to_nodes({place.path!r})"
        return (
            f"{about} no other node has in the next attempt: write below the working"
            f" directory, which all find, or call {copy}"
        )
    node = f" --node {shlex.quote(place.nodes[0])}" * (len(place.nodes) == 1)
    return f"{about} stays there: orchestrator pull {shlex.quote(place.path)}{node} fetches it"
