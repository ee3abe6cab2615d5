"""Removes the snapshots of jobs whose run directories go, and contents that nobody needs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.transfer import snapshot
from orchestrator.node.transfer.store import Store

Run = tuple[str, int]  # a job, and the index of a node in it


def snapshots_of(runs: Iterable[Run]) -> dict[Run, bytes]:
    """Return the snapshots in which these jobs ran; their specs say which."""
    store = Store()
    held = {}
    for job, node in runs:
        with contextlib.suppress(ValueError):  # no name of a job: node/job/cleanup.py says so
            own = snapshot.of_run(store, RunDir(job, node))
            if own:
                held[job, node] = own
    return held


def remove(held: dict[Run, bytes], gone: Iterable[Run]) -> int:
    """Remove the snapshots of the runs that are gone; return how many bytes that freed."""
    store, freed = Store(), 0
    for run in gone:
        if run in held:
            with contextlib.suppress(OSError):
                freed += snapshot.remove(held[run])
    with contextlib.suppress(OSError):  # nothing was ever sent here
        if os.path.isdir(store.snapshots):
            snapshot.remove_unused(store, time.time())
            freed += store.collect(time.time())
    return freed
