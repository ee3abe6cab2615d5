"""Find the git revision of the launch directory, and what was edited since."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.head.transfer.code.listing import NO_PROGRAMS, private_part

LARGEST_DIFF_CHARACTERS = 1 << 20  # that are kept
SECONDS = 5.0  # of a launch, for each question; a large tree on a network disk takes long


def of(
    directory: Path, secret_files: Sequence[Path] = (), apart: Iterable[bytes] = ()
) -> dict[str, Any] | None:
    """Return the revision and the edited files; None outside a git repository or without git.

    The contents of files that do not travel because they are private are no part of the edits, nor
    are `apart`, directories below this one: experiments are no code, also where git knows them.
    """
    commit, _, top = (_git(directory, "rev-parse", "HEAD", "--show-toplevel") or "").partition("\n")
    if not top:
        return None
    paths = [":(top)", *(f":(exclude,literal){os.fsdecode(name)}" for name in apart)]
    diff = edits(directory, Path(top), secret_files, paths)
    changed = _git(directory, "status", "--porcelain", "--untracked-files=no", "--", *paths) or ""
    return {
        "commit": commit,
        "branch": _git(directory, "rev-parse", "--abbrev-ref", "HEAD"),
        "changed_files": [line[3:] for line in changed.splitlines()],
        "diff": (diff or "")[:LARGEST_DIFF_CHARACTERS],
        "diff_is_whole": diff is not None and len(diff) <= LARGEST_DIFF_CHARACTERS,
    }


def edits(
    directory: Path, top: Path, secret_files: Sequence[Path], paths: Sequence[str]
) -> str | None:
    """Return git's diff without private files; None where git cannot tell, or not in time."""
    question = ("-c", "core.quotePath=false", "diff", "HEAD", "--no-color", "--no-ext-diff")
    names = _git(directory, *question, "--name-only", "-z", "--", *paths)
    if names is None:
        return None
    private = [
        f":(top,exclude,literal){name}"
        for name in names.split("\0")
        if private_part(os.fsencode(name)) or top / name in secret_files
    ]
    return _git(directory, *question, "--no-textconv", "--", *paths, *private)


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *NO_PROGRAMS, "--no-optional-locks", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None
