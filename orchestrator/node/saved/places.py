"""Where a program saves: where it runs, in its outputs, in memory, and where it was told to."""

from __future__ import annotations

import os
from collections.abc import Iterable

from orchestrator.node.job.run_directory import RunDir
from orchestrator.protocol.manifest import is_inside
from orchestrator.protocol.spec import Spec

WORK, OUTPUTS, MEMORY, GIVEN = "work", "outputs", "memory", "given/"


def roots(run: RunDir, spec: Spec, given: Iterable[str]) -> dict[str, str]:
    """Return the directory that each of the places is on this node."""
    found = {WORK: spec.workdir, OUTPUTS: os.path.join(experiment(run, spec), "outputs")}
    if memory := spec.env.get("ORCHESTRATOR_RESUME_DIR"):
        found[MEMORY] = memory
    for name in given:
        own = os.path.join(spec.workdir, name)
        if not is_inside(os.fsencode(name)):
            raise ValueError(f"a path that leads out of the directory: {name!r}")
        if os.path.islink(own) and os.path.isdir(own):  # the node's own: sync.outputs
            found[GIVEN + name] = os.path.realpath(own)
    return found


def experiment(run: RunDir, spec: Spec) -> str:
    """Return the experiment's directory here: the head's, where both share a disk, or our own."""
    own = os.path.join(run.path, "experiment")
    named = spec.env.get("ORCHESTRATOR_EXPERIMENT", "")
    return named if named and os.path.isdir(named) else own


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


def began(run: RunDir, spec: Spec) -> float:
    """Return since when what is written is the job's; on a shared disk by the clock of that."""
    if one_disk(run, spec):
        path = os.path.join(spec.env["ORCHESTRATOR_EXPERIMENT"], "config.yaml")
        if os.path.exists(path):
            return os.stat(path).st_mtime
    return os.stat(run.spec).st_mtime
