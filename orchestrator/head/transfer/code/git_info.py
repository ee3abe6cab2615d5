"""Find the git revision of the launch directory, and which files were edited since."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from orchestrator.head.transfer.code.listing import NO_PROGRAMS

SECONDS = 5.0  # of a launch, for each question; a large tree on a network disk takes long


def of(directory: Path, apart: Iterable[bytes] = ()) -> dict[str, Any] | None:
    """Return the revision and the edited files; None outside a git repository or without git.

    `apart` are directories below this one: experiments are no code, also where git knows them.
    """
    commit = _git(directory, "rev-parse", "HEAD")
    if not commit:
        return None
    paths = [":(top)", *(f":(exclude,literal){os.fsdecode(name)}" for name in apart)]
    changed = _git(directory, "diff", "HEAD", "--name-only", "-z", "--", *paths)
    return {
        "commit": commit,
        "branch": _git(directory, "rev-parse", "--abbrev-ref", "HEAD"),
        "changed_files": [name for name in changed.split("\0") if name],
    }


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", *NO_PROGRAMS, "--no-optional-locks", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.rstrip("\n") if done.returncode == 0 else ""
