"""Find the git revision of the launch directory, and what was edited since."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

LARGEST_DIFF = 1 << 20  # characters that are kept


def of(directory: Path) -> dict[str, Any] | None:
    """Return the revision and the edited files; None outside a git repository or without git."""
    commit = _git(directory, "rev-parse", "HEAD")
    if not commit:
        return None
    plain = ("--no-color", "--no-ext-diff", "--no-textconv")
    diff = _git(directory, "-c", "core.quotePath=false", "diff", "HEAD", *plain) or ""
    changed = _git(directory, "status", "--porcelain", "--untracked-files=no") or ""
    return {
        "commit": commit,
        "branch": _git(directory, "rev-parse", "--abbrev-ref", "HEAD"),
        "changed_files": [line[3:] for line in changed.splitlines()],
        "diff": diff[:LARGEST_DIFF],
        "diff_is_whole": len(diff) <= LARGEST_DIFF,
    }


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None
