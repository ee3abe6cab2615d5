"""Keeps files that only the head has until a job's ranks need them: a function, its arguments.

They come before the start, in pieces, and wait next to the run directory until that exists. They
hold whatever the user handed over, so they are 0600, and go when the job has ended.
"""

from __future__ import annotations

import os
import re
import shutil

from orchestrator.node.job.run_directory import RunDir

NAME = re.compile(r"[A-Za-z0-9_]+[.](pkl|zip)")


def keep(run: RunDir, name: str, data: bytes | bytearray) -> None:
    """Append a piece to one of the files."""
    if not NAME.fullmatch(name):
        raise ValueError(f"not the name of a parcel's file: {name!r}")
    directory = waiting(run)
    os.makedirs(os.path.dirname(directory), mode=0o700, exist_ok=True)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    fd = os.open(os.path.join(directory, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with open(fd, "ab") as file:
        file.write(data)


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
