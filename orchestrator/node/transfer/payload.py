"""Keeps files that only the head has until a job's ranks need them: a function, its arguments.

They come before the start, and wait next to the run directory until that exists. They
hold whatever the user handed over, so they are 0600, and go when the job has ended.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.transfer.directory import TargetDirectory
from orchestrator.protocol.manifest import FILE, Entry

NAME = re.compile(rb"[A-Za-z0-9_]+[.](pkl|zip)")


def place(run: RunDir, entries: Sequence[Entry]) -> TargetDirectory:
    """Return the directory for these files."""
    for entry in entries:
        if entry.kind != FILE or not NAME.fullmatch(entry.path):
            raise ValueError(f"not the name of a file for a job: {entry.path!r}")
    return TargetDirectory(Path(waiting(run)), entries, 0o077, private=True)


def waiting(run: RunDir) -> str:
    return run.path + ".parcel"


def hand_over(run: RunDir, first: RunDir) -> None:
    """Move the files into the run directory; a later attempt has those of the first."""
    if os.path.isdir(waiting(run)):
        os.rename(waiting(run), run.parcel)
    elif first.path != run.path and os.path.isdir(first.parcel):
        os.symlink(first.parcel, run.parcel)


def discard(run: RunDir) -> None:
    """Delete the files of a job that was never started."""
    shutil.rmtree(waiting(run), ignore_errors=True)
