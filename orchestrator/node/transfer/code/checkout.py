"""Makes snapshots for the jobs of one head, and leaves none that no job has taken up."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable

from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.server.visit import RoomState, Visit
from orchestrator.node.transfer.code import installs, snapshot
from orchestrator.node.transfer.code.store import Store
from orchestrator.protocol.requests.transfer import CheckedOut, CheckOut
from orchestrator.protocol.spec import Spec


class CodeVisit(RoomState):
    """One head's work on the store, and the snapshots that no job has yet."""

    def __init__(self, visit: Visit) -> None:
        super().__init__(visit)
        self.store = Store()
        self.store.prepare()
        self.unused: set[bytes] = set()

    def check_out(self, request: CheckOut) -> CheckedOut:
        """Make a snapshot of a tree that was offered, once its contents are here."""
        from orchestrator.node.machine.disks import disk
        from orchestrator.node.machine.probe import resolve_target

        entries = self.store.tree(request.tree)
        with self.store.writing():
            made = snapshot.make(self.store, request.snapshot, request.title, entries)
            self.unused.add(made.path)
            linked = snapshot.link_inputs(made.root, request.beside, request.inputs)
            snapshot.link_outputs(made, request.beside, request.outputs)
            installed = installs.installs_from(request.beside)
            installs.note(made.path, installed.first)
        workdir = os.fsdecode(made.root)
        return CheckedOut(
            workdir=workdir,
            own=tuple(linked),
            installed=tuple(installed.first),
            strange=tuple(installed.strange),
            target=resolve_target(request.target, workdir),
            disk=disk(workdir),
        )

    def job_started(self, run: RunDir, spec: Spec) -> None:
        """Leave the snapshot to the job that runs in it."""
        path = snapshot.snapshot_of(self.store, spec.workdir)
        if path in self.unused:
            self.unused.remove(path)
            snapshot.keep(path, run)
            # The job does not wait for it.
            threading.Thread(target=self.tidy, daemon=True).start()

    def tidy(self) -> None:
        with contextlib.suppress(OSError):
            snapshot.tidy(self.store, time.time())

    def leave(self) -> None:
        """Remove snapshots without a job."""
        for path in self.unused:
            with contextlib.suppress(OSError):
                snapshot.remove(path)


# Removes the snapshots of jobs whose run directories go, and contents that no tree needs.

Run = tuple[str, int]  # a job, and the index of a node in it


def snapshots_of(runs: Iterable[Run]) -> dict[Run, bytes]:
    """Return the snapshots in which these jobs ran; their specs name them."""
    store = Store()
    held = {}
    for job, node in runs:
        with contextlib.suppress(ValueError):  # no name of a job: node/job/cleanup.py says so
            path = snapshot.of_run(store, RunDir(job, node))
            if path:
                held[job, node] = path
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
            snapshot.tidy(store, time.time())
            freed += store.collect(time.time())
    return freed
