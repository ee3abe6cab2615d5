"""Fills gaps in the metrics at home, once a job is over, from nodes that its ranks have left.

What a rank measured in the seconds before its node was lost nobody could ask for, and another node
went on behind it. Where that one answers again, the lines of steps that are missing here are taken;
what is here stays as it is.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Collection
from pathlib import Path

from orchestrator.common import files
from orchestrator.common.errors import OrchestratorError
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.transfer.fetch.growing import step_of
from orchestrator.protocol.requests.transfer import Output, Outputs
from orchestrator.records.metrics import trainers

LARGEST_BYTES = 64 << 20
ANSWER_SECONDS = 10.0
MERGING = threading.Lock()  # two nodes may have lines of one rank


def lacking(outputs: Path) -> set[str]:
    """Return the names of the files of metrics here in which steps are missing."""
    paths = [path for found in trainers.measured(outputs).values() for path in found.values()]
    return {path.name for path in paths if has_gap(path)}


def has_gap(path: Path) -> bool:
    steps = sorted({0.0, *filter(math.isfinite, map(step_of, lines_of(path)))})
    apart = [after - before for before, after in itertools.pairwise(steps)]
    return bool(apart) and max(apart) > min(apart[1:] or apart)


def lines_of(path: Path) -> list[bytes]:
    try:
        with files.open_plain(path) as file:
            return file.read(LARGEST_BYTES).splitlines(keepends=True)
    except OSError:
        return []


def fill(
    channel: NodeChannel, part: tuple[str, int], outputs: Path, wanted: Collection[str]
) -> None:
    """Take what one node has of these files; without it, all stays as it is."""
    job, node = part
    with contextlib.suppress(OrchestratorError, OSError):
        listing = channel.ask(Outputs(job=job, node=node), ANSWER_SECONDS)
        for file in listing.files:
            if file.kind == "file" and file.path in wanted and file.size <= LARGEST_BYTES:
                theirs = fetched(channel, listing.place, file.path)
                with MERGING:
                    ours = lines_of(outputs / file.path)
                    if (merged := with_lines(ours, theirs)) != ours:
                        files.replace(outputs / file.path, b"".join(merged))


def fetched(channel: NodeChannel, place: str, path: str) -> list[bytes]:
    data = bytearray()
    while len(data) <= LARGEST_BYTES:
        request = Output(place=place, path=path, offset=len(data))
        piece = channel.ask(request, ANSWER_SECONDS).data
        if not piece:
            break
        data += piece
    return bytes(data).splitlines(keepends=True)


def with_lines(ours: list[bytes], theirs: list[bytes]) -> list[bytes]:
    """Return our lines with theirs of the steps that we have not, each at its place. Pure."""
    known = {step_of(line) for line in ours}
    last = max(known, default=-math.inf)
    whole = [(step_of(line), line) for line in theirs if line.endswith(b"\n")]
    new = [each for each in whole if each[0] not in known and math.isfinite(each[0])]
    rest = sorted((each for each in new if each[0] < last), key=lambda each: each[0])
    merged: list[bytes] = []
    for line in ours:
        while rest and rest[0][0] < step_of(line):
            merged.append(rest.pop(0)[1])
        merged.append(line)
    return merged
