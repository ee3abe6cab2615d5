"""Says when a state was kept last that a later attempt could go on from: in memory, or on disk."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from orchestrator.node.job.run_directory import RunDir

STEP = re.compile(r"step_[0-9]{8,}")


def last(run: RunDir) -> float:
    """Return when something was kept last; 0 for nothing."""
    env = run.read_spec().env
    memory = list(files(env.get("ORCHESTRATOR_RESUME_DIR", "")))
    store = os.path.join(env.get("ORCHESTRATOR_EXPERIMENT", ""), "outputs", "checkpoints")
    saved = [entry for entry in files(store) if STEP.fullmatch(entry.name)]
    return max((when(entry) for entry in [*memory, *saved]), default=0.0)


def files(path: str) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(path or os.devnull) as entries:
        yield from entries


def when(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except OSError:
        return 0.0
