"""Tells what a program wrote beside its code on nodes that were sent it, and where it is."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.text import plural, size
from orchestrator.protocol.requests.transfer import OutputFile

MOST_BYTES, MOST_FILES = 64 << 20, 1000  # of a node, that come at the end of a job
NAMED = 3


@dataclass(frozen=True)
class Beside:
    """Hold what the ranks of one node wrote there, and whether it has come."""

    files: Sequence[OutputFile]
    has_come: bool


def is_much(files: Sequence[OutputFile]) -> bool:
    """Tell whether it is more than anybody would wait for unasked."""
    return len(files) > MOST_FILES or sum(file.size for file in files) > MOST_BYTES


def told(found: Mapping[int, Beside], outputs: Path) -> list[str]:
    """Say where it is now, and how the next launch finds it: in two sentences for all nodes."""
    come = {node: each.files for node, each in found.items() if each.has_come}
    stays = {node: each.files for node, each in found.items() if not each.has_come}
    said = []
    if come:
        said.append(f"{written(come)}: now in {outputs}{kept(come)}")
    if stays:
        pull = f"orchestrator pull {outputs.parent.name}"
        said.append(f"{written(stays)}, which is left there: {pull} fetches it{kept(stays)}")
    return said


def written(found: Mapping[int, Sequence[OutputFile]]) -> str:
    files = [file for each in found.values() for file in each]
    names = sorted({file.path.partition("/")[0] for file in files})
    named = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" * (len(names) > NAMED))
    where = f"node {min(found)}" if len(found) == 1 else plural(len(found), "node")
    much = f"{plural(len(files), 'file')}, {size(sum(file.size for file in files))}"
    return f"the program wrote {named} beside its code on {where} ({much})"


def kept(found: Mapping[int, Sequence[OutputFile]]) -> str:
    files = (file for each in found.values() for file in each)
    directories = sorted({file.path.partition("/")[0] for file in files if "/" in file.path})
    if not directories:
        return ""
    setting = shlex.quote(f"sync.outputs=[{','.join(directories[:NAMED])}]")
    return f"; for the next launch to find it there: --set {setting}"
