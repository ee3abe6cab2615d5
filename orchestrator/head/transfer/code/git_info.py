"""Find the git revision of the launch directory, and what was edited since."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from orchestrator.head.transfer.code.listing import NO_PROGRAMS

LARGEST_DIFF = 1 << 20  # characters that are kept
SECONDS = 5.0  # of a launch, for each question; a large tree on a network disk takes long


def of(directory: Path) -> dict[str, Any] | None:
    """Return the revision and the edited files; None outside a git repository or without git."""
    commit = _git(directory, "rev-parse", "HEAD")
    if not commit:
        return None
    plain = ("--no-color", "--no-ext-diff", "--no-textconv")
    diff = _git(directory, "-c", "core.quotePath=false", "diff", "HEAD", *plain)
    changed = _git(directory, "status", "--porcelain", "--untracked-files=no") or ""
    return {
        "commit": commit,
        "branch": _git(directory, "rev-parse", "--abbrev-ref", "HEAD"),
        "changed_files": [line[3:] for line in changed.splitlines()],
        "diff": (diff or "")[:LARGEST_DIFF],
        "diff_is_whole": diff is not None and len(diff) <= LARGEST_DIFF,
    }


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
