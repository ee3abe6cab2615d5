"""Does what one head asks about code: takes trees, makes snapshots, compares shared directories."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
import zlib
from collections.abc import Iterator

from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.server.visit import RoomState, Visit
from orchestrator.node.transfer import snapshot
from orchestrator.node.transfer.behind import Behind
from orchestrator.node.transfer.store import Arrivals, Store, hash_of, unzip
from orchestrator.protocol import manifest as tree
from orchestrator.protocol.manifest import LARGEST_LIST, is_inside
from orchestrator.protocol.requests.request import Nothing
from orchestrator.protocol.requests.transfer import CheckedOut, CheckOut, Compared, Lacking
from orchestrator.protocol.spec import Spec

LARGEST_BATCH = 1 << 24  # bytes of contents in one request, unpacked
MOST_DIFFERENCES = 1000


class CodeVisit(RoomState):
    """One head's work on the store, and the snapshots that no job has yet."""

    def __init__(self, visit: Visit) -> None:
        super().__init__(visit)
        self.store = Store()
        self.store.prepare()
        self.arrivals: dict[str, Incoming] = {}
        self.unused: dict[bytes, str] = {}  # snapshot -> its tree
        self.tidied = False

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Say in words why the store cannot be written, such as a full disk."""
        try:
            yield
        except OSError as error:
            root = os.fsdecode(self.store.root)
            where = "" if self.store.root in os.fsencode(error.filename or b"") else error.filename
            raise ValueError(f"{where or root} cannot be written: {error.strerror}") from error

    def offer(self, digest: str, packed: bytes | bytearray) -> Lacking:
        """Keep the list of a tree, and say which contents are lacking."""
        listing = unzip(packed, LARGEST_LIST)
        if tree.digest_of(listing) != digest:
            raise ValueError("the list of the tree was damaged on its way")
        entries = tree.unpacked(listing)
        with self.writing():
            self.store.keep_tree(digest, listing)
        positions = self.store.lacking(entries)
        self.abandon(digest)
        self.arrivals[digest] = Incoming(Arrivals(self.store, [entries[at] for at in positions]))
        return Lacking(ranges=tuple(ranges(positions)))

    def contents(self, digest: str, size: int, packed: bytes | bytearray) -> Nothing:
        """Have the contents written that came; the answer to the last says that all are."""
        if digest not in self.arrivals or size > LARGEST_BATCH:
            raise ValueError("contents that nobody expects")
        try:
            data = zlib.decompress(packed, bufsize=max(1, size))
            if len(data) != size:
                raise ValueError("contents of another size came")
            with self.writing():
                self.arrivals[digest].take(data)
        except zlib.error as error:
            self.abandon(digest)
            raise ValueError(f"contents were damaged on their way: {error}") from None
        except ValueError:
            self.abandon(digest)
            raise
        return Nothing()

    def abandon(self, digest: str) -> None:
        if digest in self.arrivals:
            self.arrivals.pop(digest).abandon()

    def check_out(self, request: CheckOut) -> CheckedOut:
        """Make a snapshot; Incomplete where contents have to come first."""
        from orchestrator.node.facts.disks import disk
        from orchestrator.node.facts.probe import resolve_target

        if not self.tidied:
            self.tidied = True
            snapshot.remove_unused(self.store, time.time())
        entries = self.store.tree(request.tree)
        with self.writing():
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
        """Remove what nobody will use: half a content, and snapshots without a job."""
        for digest in list(self.arrivals):
            self.abandon(digest)
        for own in self.unused:
            with contextlib.suppress(OSError):
                snapshot.remove(own)


class Incoming:
    """The contents of a tree on their way into the store."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.arrivals = arrivals
        self.behind = Behind(arrivals.take)
        self.left = sum(entry.size for entry in arrivals.expected)

    def take(self, data: bytes) -> None:
        self.behind.put(data)
        self.left -= len(data)
        if self.left <= 0:
            self.behind.finish()

    def abandon(self) -> None:
        with contextlib.suppress(Exception):  # it was told, or nobody asks for it any more
            self.behind.finish()
        self.arrivals.abandon()


def ranges(positions: list[int]) -> list[tuple[int, int]]:
    """Return [1, 2, 3, 7] as (1, 3), (7, 7)."""
    pairs: list[tuple[int, int]] = []
    for at in positions:
        if pairs and pairs[-1][1] == at - 1:
            pairs[-1] = (pairs[-1][0], at)
        else:
            pairs.append((at, at))
    return pairs


def compare(directory: str, packed: bytes | bytearray) -> Compared:
    """Look at files that the head named with size and time; hash those that look otherwise."""
    fields = unzip(packed, LARGEST_LIST).split(b"\0")[:-1]
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
