"""Says what a later attempt of a job could go on from here: a state in memory, a checkpoint, or a
file of the program's own."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator

from orchestrator.node.job.run_directory import RunDir
from orchestrator.protocol.messages import Saved
from orchestrator.protocol.spec import Spec

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


def saved(run: RunDir) -> Saved:
    """Name the files in which the program has saved something since the job began: where it runs,
    and in the outputs of its experiment."""
    spec = run.read_spec()
    shared, began = one_disk(run, spec), os.stat(run.spec).st_mtime
    experiment = spec.env.get("ORCHESTRATOR_EXPERIMENT", "")
    outputs = os.path.join(experiment, "outputs")
    if shared:  # by the clock of that disk: what nodes see must not differ as their clocks do
        with contextlib.suppress(OSError):
            began = os.stat(os.path.join(experiment, "config.yaml")).st_mtime
    found, whole, until = [], True, time.monotonic() + LOOKING
    for name, root in (("outputs", outputs), ("", spec.workdir)):
        for number, (own, entry) in enumerate(below(root, name)):
            if number == MOST_LOOKED_AT or time.monotonic() > until:
                whole = False
                break
            if OURS.fullmatch(own) or not SAVED.fullmatch(entry.name) or when(entry) < began:
                continue
            found.append(own)
    names = tuple(sorted(found)[:MOST_NAMED])
    return Saved(names=names, shared=whole and shared)


def one_disk(run: RunDir, spec: Spec) -> bool:
    """Tell whether the program runs on the disk of the head's experiment, which nodes share."""
    experiment = os.path.realpath(spec.env.get("ORCHESTRATOR_EXPERIMENT", ""))
    workdir = os.path.realpath(spec.workdir)
    if experiment == os.path.realpath(os.path.join(run.path, "experiment")):
        return False  # this node's own
    try:
        same = os.stat(experiment).st_dev == os.stat(workdir).st_dev
    except OSError:
        return False
    return same and experiment.startswith(os.path.join(workdir, ""))


def below(path: str, name: str, depth: int = 0) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the files in a directory, with their names, and those below it, not in hidden ones."""
    for entry in files(path):
        own = os.path.join(name, entry.name)
        if not entry.is_dir(follow_symlinks=False):
            yield own, entry
        elif depth < DEEPEST and not entry.name.startswith("."):
            yield from below(entry.path, own, depth + 1)
