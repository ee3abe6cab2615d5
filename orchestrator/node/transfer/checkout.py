"""Does what one head asks about code: makes snapshots, compares shared directories."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time

from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.server.visit import RoomState, Visit
from orchestrator.node.transfer import snapshot
from orchestrator.node.transfer.receive import unzip
from orchestrator.node.transfer.store import Store, hash_of
from orchestrator.protocol.manifest import LARGEST_LIST_BYTES, is_inside
from orchestrator.protocol.requests.transfer import CheckedOut, CheckOut, Compared
from orchestrator.protocol.spec import Spec

MOST_DIFFERENCES = 1000


class CodeVisit(RoomState):
    """One head's work on the store, and the snapshots that no job has yet."""

    def __init__(self, visit: Visit) -> None:
        super().__init__(visit)
        self.store = Store()
        self.store.prepare()
        self.unused: dict[bytes, str] = {}  # snapshot -> its tree
        self.tidied = False

    def check_out(self, request: CheckOut) -> CheckedOut:
        """Make a snapshot; Incomplete where contents have to come first."""
        from orchestrator.node.machine.disks import disk
        from orchestrator.node.machine.probe import resolve_target

        if not self.tidied:
            self.tidied = True
            snapshot.remove_unused(self.store, time.time())
        entries = self.store.tree(request.tree)
        with self.store.writing():
            made = snapshot.make(self.store, request.snapshot, request.title, entries)
            root = made.root
            self.unused[os.path.dirname(root)] = request.tree
            own = snapshot.link_own(root, request.beside, entries)
            snapshot.link_outputs(root, request.beside, request.outputs)
        workdir = os.fsdecode(root)
        return CheckedOut(
            workdir=workdir,
            tree=made.digest,
            differ=tuple(path.encode("utf-8", "replace").decode() for path in made.differ[:100]),
            own=tuple(name.encode("utf-8", "replace").decode() for name in own),
            target=resolve_target(request.target, workdir),
            disk=disk(workdir),
        )

    def job_started(self, run: RunDir, spec: Spec) -> None:
        """Leave the snapshot to the job that runs in it."""
        own = snapshot.snapshot_of(self.store, spec.workdir)
        if own in self.unused:
            snapshot.keep(self.store, spec.workdir, run, self.unused.pop(own))
            threading.Thread(target=self.tidy, daemon=True).start()  # nobody waits for it

    def tidy(self) -> None:
        with contextlib.suppress(OSError):  # another head may do the same
            snapshot.remove_old(self.store)

    def leave(self) -> None:
        """Remove what nobody will use: snapshots without a job."""
        for own in self.unused:
            with contextlib.suppress(OSError):
                snapshot.remove(own)


def compare(directory: str, packed: bytes | bytearray) -> Compared:
    """Look at files that the head named with size and time; hash those that look otherwise."""
    fields = unzip(packed, LARGEST_LIST_BYTES).split(b"\0")[:-1]
    differ: dict[str, str] = {}
    for path, size, mtime in zip(fields[::3], fields[1::3], fields[2::3]):  # noqa: B905  3.9
        if not is_inside(path):
            raise ValueError(f"a path that leads out of the tree: {path[:60]!r}")
        where = os.path.join(os.fsencode(directory), path)
        try:
            status = os.stat(where)
            if (b"%d" % status.st_size, b"%d" % status.st_mtime_ns) == (size, mtime):
                continue
            state = hash_of(where).decode() if stat.S_ISREG(status.st_mode) else "not a file"
        except OSError as error:
            state = os.strerror(error.errno or 0).lower()
        differ[os.fsdecode(path)] = state
        if len(differ) == MOST_DIFFERENCES:
            break
    return Compared(differ=differ)
