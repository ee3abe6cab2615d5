"""Read and compress contents once for all nodes that lack the same: they come in batches."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.common.errors import CheckFailed, OrchestratorError
from orchestrator.head.transfer.code.scan import Tree, unreadable
from orchestrator.protocol.manifest import Entry

if TYPE_CHECKING:
    from concurrent.futures import Future

BATCH = 4 << 20  # bytes before compression
MOST_AHEAD = 4  # batches in memory that no node has asked for yet
SAMPLE = 1 << 16
WORTH_IT = 0.95  # what compresses to more is sent as it is


class Changed(Exception):
    """A file is not what it was when the tree was read."""

    def __init__(self, path: bytes) -> None:
        super().__init__(os.fsdecode(path))
        self.path = path


class Batch(NamedTuple):
    data: bytes  # compressed
    size: int  # before


def no_place(error: OSError) -> CheckFailed:
    """Say that there is no room here for contents on their way."""
    place = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
    return CheckFailed(
        f"the code on its way to the nodes cannot wait in {place}: {error.strerror or error}",
        "make room there, or set TMPDIR to a directory with room",
    )


class Batches:
    """The contents of some files. A node takes batch after batch at its own pace.

    They wait in a temporary file, so that a slow node costs no memory and holds no other up.
    """

    def __init__(self, tree: Tree, positions: Sequence[int]) -> None:
        from concurrent.futures import ThreadPoolExecutor  # brings logging: 5 ms

        self.entries = [tree.entries[at] for at in positions]
        self.directory = tree.directory
        self.size = sum(entry.size for entry in self.entries)
        self.lock = threading.Lock()  # the first node that wants a batch reads it for all
        try:
            self.spool = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  open as long as this
        except OSError as error:
            raise no_place(error) from error
        self.end = 0  # of what is in it
        self.known: list[tuple[int, int, int]] = []  # offset, length, size before compression
        self.source = self.contents()
        self.ahead: deque[tuple[int, Future[bytes]]] = deque()
        self.pool = ThreadPoolExecutor(os.cpu_count() or 1)  # zlib lets other threads run
        self.error: Exception | None = None

    def get(self, number: int) -> Batch | None:
        """Return a batch; None after the last."""
        with self.lock:
            if self.error is not None:
                raise self.error
            if number == len(self.known):
                self.read_ahead()
                if not self.ahead:
                    return None
                size, future = self.ahead.popleft()
                data = future.result()
                self.known.append((self.keep(data), len(data), size))
            offset, length, size = self.known[number]
        return Batch(os.pread(self.spool.fileno(), length, offset), size)

    def keep(self, data: bytes) -> int:
        """Add a batch to the file, and return where it begins there."""
        offset, rest = self.end, memoryview(data)
        try:
            while rest:
                count = os.pwrite(self.spool.fileno(), rest, self.end)
                self.end, rest = self.end + count, rest[count:]
        except OSError as error:
            self.error = no_place(error)  # for the other nodes, too: this batch is gone
            raise self.error from error
        return offset

    def read_ahead(self) -> None:
        """Have the next batches compressed, as many at a time as there are CPUs."""
        try:
            while len(self.ahead) <= MOST_AHEAD and (raw := next(self.source, None)) is not None:
                self.ahead.append((len(raw), self.pool.submit(compressed, raw)))
        except (Changed, OrchestratorError) as error:
            self.error = error
            raise

    def contents(self) -> Iterator[bytes]:
        """Yield all contents, one after the other, in pieces of one size."""
        waiting: list[bytes] = []
        count = 0
        for entry in self.entries:
            for data in read(self.directory, entry):
                waiting.append(data)
                count += len(data)
                if count >= BATCH:
                    yield b"".join(waiting)
                    waiting, count = [], 0
        if waiting or any(not entry.size for entry in self.entries):
            yield b"".join(waiting)  # an empty one still makes the node write empty files

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        self.spool.close()


def read(directory: bytes, entry: Entry) -> Iterator[bytes]:
    """Yield a file's content, and see that it is the one that the tree lists."""
    digest, left = hashlib.sha256(), entry.size
    try:
        path = os.path.join(directory, entry.path)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(path, flags), "rb", buffering=0) as file:
            while left and (data := file.read(min(left, BATCH))):
                digest.update(data)
                left -= len(data)
                yield data
    except FileNotFoundError:
        raise Changed(entry.path) from None
    except OSError as error:
        raise unreadable(entry.path, error) from error
    if digest.hexdigest().encode() != entry.value:
        raise Changed(entry.path)


def compressed(raw: bytes) -> bytes:
    """Compress quickly, or hardly at all where that would be in vain."""
    sample = raw[:SAMPLE]
    level = 1 if len(zlib.compress(sample, 1)) < WORTH_IT * len(sample) else 0
    return zlib.compress(raw, level)
