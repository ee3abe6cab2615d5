"""Fills gaps in the metrics at home from nodes that their ranks have left.

What a rank measured in the seconds before its node was lost could not be fetched, and another node
went on behind it. Where that one answers again, the lines of steps that are missing here are taken;
what is here stays as it is. That is when it joins a further attempt, as its disk may be lost by the
end of the job, and else at that end.
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
from orchestrator.head.transfer.fetch.fetch import read_bytes
from orchestrator.head.transfer.fetch.growing import step_of
from orchestrator.protocol.requests.transfer import OutputFile, Outputs
from orchestrator.protocol.timing import QUICK_ANSWER_SECONDS
from orchestrator.records.metrics import trainers

LARGEST_BYTES = 64 << 20
LATEST_BYTES = 1 << 20  # thousands of lines; those of minutes may be missing
MERGING = threading.Lock()  # two nodes may have lines of one rank


def lacking(outputs: Path) -> set[str]:
    """Return the names of the files of metrics here in which steps are missing."""
    return {path.name for path in measured(outputs) if has_gap(path)}


def measured(outputs: Path) -> list[Path]:
    return [path for found in trainers.measured(outputs).values() for path in found.values()]


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


def extend(channel: NodeChannel, part: tuple[str, int], outputs: Path) -> None:
    """Take also what a node measured last of steps that no file here has reached.

    The ranks that go on from an earlier step do these again, and replace them.
    """
    fill(channel, part, outputs, {path.name for path in measured(outputs)}, beyond=True)


def fill(
    channel: NodeChannel,
    part: tuple[str, int],
    outputs: Path,
    wanted: Collection[str],
    *,
    beyond: bool = False,
) -> None:
    """Take what one node has of the steps that these files lack; without it, all stays as it is.

    `beyond`: also of steps after the last one here, which stand in its last lines.
    """
    most = LATEST_BYTES if beyond else LARGEST_BYTES
    job, node = part
    with contextlib.suppress(OrchestratorError, OSError):
        listing = channel.ask(Outputs(job=job, node=node), QUICK_ANSWER_SECONDS)
        for file in listing.files:
            if file.kind == "file" and file.path in wanted and file.size <= LARGEST_BYTES:
                theirs = last_lines(channel, listing.place, file, most)
                with MERGING:
                    ours = lines_of(outputs / file.path)
                    if (merged := with_lines(ours, theirs, beyond=beyond)) != ours:
                        files.replace(outputs / file.path, b"".join(merged))


def last_lines(channel: NodeChannel, place: str, file: OutputFile, most: int) -> list[bytes]:
    """Return the last lines of a file, of so many bytes."""
    begin = max(0, file.size - most)
    lines = read_bytes(channel, place, file.path, most, begin=begin).splitlines(keepends=True)
    return lines[1:] if begin else lines


def with_lines(ours: list[bytes], theirs: list[bytes], *, beyond: bool = False) -> list[bytes]:
    """Return our lines with theirs of the steps that we have not, each at its place. Pure.

    `beyond`: also of steps after our last one.
    """
    known = {step_of(line) for line in ours}
    last = math.inf if beyond else max(known, default=-math.inf)
    whole = [(step_of(line), line) for line in theirs if line.endswith(b"\n")]
    new = [each for each in whole if each[0] not in known and math.isfinite(each[0])]
    rest = sorted((each for each in new if each[0] < last), key=lambda each: each[0])
    merged: list[bytes] = []
    for line in ours:
        while rest and rest[0][0] < step_of(line):
            merged.append(rest.pop(0)[1])
        merged.append(line)
    return merged + [line for _, line in rest]
