"""Says what a later attempt of a job could go on from here: a state in memory, a checkpoint, or a
file of the program's own."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterator

from orchestrator.node.job.run_directory import RunDir

STEP = re.compile(r"step_[0-9]{8,}")
SAVED = re.compile(r"\.metadata|[^.].*\.(pt|pth|ckpt|bin|safetensors|npz|pkl|h5|keras)")
OURS = re.compile(r"outputs/checkpoints/step_[0-9]{8,}/.*")  # a start brings them itself
MOST_LOOKED_AT, DEEPEST, MOST_NAMED = 10_000, 5, 200
LOOKING = 0.1  # seconds: the next attempt waits for it


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


def saved(run: RunDir) -> list[str]:
    """Name the files in which the program has saved something since the job began: where it runs,
    and in the outputs of its experiment."""
    spec = run.read_spec()
    began = os.stat(run.spec).st_mtime
    outputs = os.path.join(spec.env.get("ORCHESTRATOR_EXPERIMENT", ""), "outputs")
    found, until = [], time.monotonic() + LOOKING
    for name, root in (("outputs", outputs), ("", spec.workdir)):
        for own, entry in itertools.islice(below(root, name), MOST_LOOKED_AT):
            if time.monotonic() > until:
                break
            if OURS.fullmatch(own) or not SAVED.fullmatch(entry.name) or when(entry) < began:
                continue
            found.append(own)
    return sorted(found)[:MOST_NAMED]


def below(path: str, name: str, depth: int = 0) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the files in a directory, with their names, and those below it, not in hidden ones."""
    for entry in files(path):
        own = os.path.join(name, entry.name)
        if not entry.is_dir(follow_symlinks=False):
            yield own, entry
        elif depth < DEEPEST and not entry.name.startswith("."):
            yield from below(entry.path, own, depth + 1)
