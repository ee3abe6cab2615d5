"""Send a directory or a file to many nodes at once: only what is lacking there, or differs."""

from __future__ import annotations

import os
import stat
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from orchestrator.common.errors import EMPTY, NodeError, OrchestratorError, UsageError
from orchestrator.common.files import digest
from orchestrator.head.chores.numbered_node import NumberedNode
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import open_channel
from orchestrator.head.connect.transport import Transport
from orchestrator.head.outputs.fetch import Pipeline
from orchestrator.head.screen.progress import Progress
from orchestrator.head.transfer.fanout import Fanout
from orchestrator.head.transfer.index import Index, signature
from orchestrator.protocol import offer
from orchestrator.protocol.manifest import DIRECTORY, FILE, LINK
from orchestrator.protocol.offer import Offered
from orchestrator.protocol.requests.request import Nothing
from orchestrator.protocol.requests.transfer import OfferFiles, WantedFile, WantedFiles, WriteFile

COMPARE_SECONDS = 3600.0  # a node may have to read terabytes
PUT_SECONDS = 60.0
PIECE = 1 << 18
AUTO = Fanout()
NEVER = b".orchestrator-"  # what a transfer has left half done


@dataclass(frozen=True)
class Cargo:
    """List the files to send, and name the directory for them on each node."""

    root: bytes  # the directory here that the paths are below
    directory: str  # and the one there
    files: tuple[Offered, ...]
    left_out: tuple[str, ...] = ()
    own: dict[bytes, bytes] = field(default_factory=dict)  # path there -> here, where they differ

    def here(self, number: int) -> bytes:
        path = self.files[number].path
        return os.path.join(self.root, self.own.get(path, path))

    def opened(self, number: int) -> int:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(self.here(number), flags)


@dataclass
class Pushed:
    """Count what one node was sent, or say why nothing was."""

    target: NumberedNode
    sent: list[str] = field(default_factory=list)
    kept: int = 0
    size: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    error: OrchestratorError | None = None


def load(source: Path, destination: str | None) -> Cargo:
    """List what there is to send. DST is the name of the copy; with a / at its end, its parent."""
    source = source.absolute()
    name = source.name
    if destination == "":
        raise UsageError("DST is empty", EMPTY)
    where = destination or str(source)
    if where.endswith("/"):
        where += name
    if not (where.startswith(("/", "~/")) and Path(where).name not in ("", "~", "..")):
        raise UsageError(
            f"{destination} is relative, and nodes have no directory that it could begin in",
            "write it in full, beginning with / or ~/",
        )
    try:
        status = source.stat()
    except OSError as error:
        raise UsageError(f"{source}: {(error.strerror or str(error)).lower()}") from None
    if stat.S_ISREG(status.st_mode):
        file = offered(os.fsencode(Path(where).name), status)
        own = {file.path: os.fsencode(name)}
        return Cargo(os.fsencode(source.parent), str(Path(where).parent), (file,), (), own)
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{source} is neither a file nor a directory")
    files: list[Offered] = []
    left_out: list[str] = []
    walk(os.fsencode(source), b"", files, left_out)
    return Cargo(os.fsencode(source), where, tuple(files), tuple(left_out))


def walk(root: bytes, below: bytes, files: list[Offered], left_out: list[str]) -> None:
    try:
        entries = sorted(os.scandir(os.path.join(root, below)), key=lambda entry: entry.name)
    except OSError as error:
        if not below:
            raise UsageError(f"{os.fsdecode(root)}: {error.strerror}") from None
        left_out.append(f"{os.fsdecode(below)} ({error.strerror})")
        return
    for entry in entries:
        path = os.path.join(below, entry.name)
        if entry.name.startswith(NEVER) and entry.name.endswith(b".part"):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue  # it has just gone
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(entry.path)
            files.append(Offered(path, LINK, 0, 0, 0, target))
        elif stat.S_ISDIR(status.st_mode):
            files.append(Offered(path, DIRECTORY, 0, 0, 0))
            walk(root, path, files, left_out)
        elif stat.S_ISREG(status.st_mode):
            files.append(offered(path, status))
        else:
            left_out.append(f"{os.fsdecode(path)} (neither a file nor a directory)")


def offered(path: bytes, status: os.stat_result) -> Offered:
    mode = stat.S_IMODE(status.st_mode) & 0o777
    return Offered(path, FILE, mode, status.st_size, status.st_mtime_ns)


class Sums:
    """The checksums of whole files, each made once for all nodes, and remembered for later."""

    def __init__(self, cargo: Cargo) -> None:
        self.cargo = cargo
        self.index = Index(b"push " + cargo.root)
        self.known: dict[int, str] = {}
        self.making: dict[int, threading.Lock] = {}
        self.lock = threading.Lock()  # of `making`

    def of(self, number: int, descriptor: int) -> str:
        with self.lock:
            making = self.making.setdefault(number, threading.Lock())
        with making:
            if number not in self.known:
                path, now, status = self.cargo.here(number), time.time_ns(), os.fstat(descriptor)
                total = self.index.digest(path, status)
                if not total or status.st_size != self.cargo.files[number].size:
                    total = digest(descriptor, 0, self.cargo.files[number].size)
                    if signature(os.fstat(descriptor)) == signature(status):
                        self.index.note(path, status, total, now)
                self.known[number] = total
            return self.known[number]

    def keep(self) -> None:
        """Remember them, and those of files that nobody asked for this time."""
        self.index.seen = {**self.index.known, **self.index.seen}
        self.index.save()


def push(
    transport: Transport,
    targets: Sequence[NumberedNode],
    cargo: Cargo,
    progress: Progress,
    *,
    dry_run: bool,
    fanout: Fanout = AUTO,
    say: Callable[[str], None] = lambda _: None,
) -> list[Pushed]:
    """Send to all nodes at once, and return in their order what each lacked.

    Where many nodes lack much, they pass it on to each other.
    """
    sums, packed = Sums(cargo), zlib.compress(offer.packed(cargo.files), 1)
    total = sum(file.size for file in cargo.files)
    progress.size = len(targets) * total
    relay = None
    if fanout.pays(len(targets), total) and not dry_run:
        from orchestrator.head.chores.relay import Relay

        relay = Relay(cargo, sums, targets, fanout, say)

    def send(at: int) -> Pushed:
        target, connection = targets[at], None
        try:
            connection = transport.connect(transport.config.of_node(target.node))
            channel = open_channel(connection, target.node, transport.timeout)
            sending = Sending(channel, target, cargo, sums, progress, packed)
            if relay is not None:
                relay.serve(at, sending)
            else:
                sending.offer(dry_run=dry_run)
            return sending.result
        finally:
            if relay is not None:
                relay.end(at, whole=False)  # if it has not come so far
            if connection is not None:
                connection.close()

    results = fleet.everywhere(range(len(targets)), send)
    sums.keep()
    return [
        Pushed(target, error=result) if isinstance(result, OrchestratorError) else result
        for target, result in zip(targets, results, strict=True)
    ]


class Sending:
    """Send one node what it lacks."""

    def __init__(
        self,
        channel: NodeChannel,
        target: NumberedNode,
        cargo: Cargo,
        sums: Sums,
        bar: Progress,
        packed: bytes,
    ) -> None:
        self.channel, self.cargo, self.sums, self.progress = channel, cargo, sums, bar
        self.packed, self.again = packed, False
        self.pipeline = Pipeline(channel)
        self.result = Pushed(target)

    def offer(self, *, dry_run: bool = False) -> None:
        """Let the node compare, and send what it wants."""
        self.deliver(self.compare(dry_run=dry_run), dry_run=dry_run)

    def compare(self, *, dry_run: bool = False) -> WantedFiles:
        """Let the node say what it lacks, which is checked."""
        files, result = self.cargo.files, self.result
        self.channel.put(self.packed, PUT_SECONDS)
        question = OfferFiles(directory=self.cargo.directory, dry_run=dry_run)
        answer = self.channel.ask(question, COMPARE_SECONDS)
        numbers = {wanted.number for wanted in answer.wanted} | set(answer.failed)
        if any(not 0 <= number < len(files) for number in numbers):
            raise NodeError("the node broke the protocol: it wants files that were not offered")
        for number, why in answer.failed.items():
            result.failed[os.fsdecode(files[number].path)] = why
        contents = [number for number, file in enumerate(files) if file.kind == FILE]
        result.kept = len([number for number in contents if number not in numbers])
        if not self.again:
            self.progress.add(sum(files[n].size for n in contents if n not in numbers))
        self.again = True
        return answer

    def deliver(self, answer: WantedFiles, *, dry_run: bool = False) -> None:
        """Send what the node lacks."""
        files, result = self.cargo.files, self.result
        for wanted in answer.wanted:
            path = os.fsdecode(files[wanted.number].path)
            if dry_run or files[wanted.number].kind != FILE:
                result.sent.append(path)
                continue
            try:
                self.send(wanted, path)
            except OSError as error:
                result.failed[path] = error.strerror or str(error)
        self.pipeline.finish()

    def send(self, wanted: WantedFile, path: str) -> None:
        number, file = wanted.number, self.cargo.files[wanted.number]
        descriptor = self.cargo.opened(number)
        try:
            total = self.sums.of(number, descriptor)
            if wanted.whole and wanted.sum == total:
                last = WriteFile(number=number, offset=0, sum=total, here=True)
                self.pipeline.ask(last, partial(self.done, path, True))
                self.progress.add(file.size)
                return
            at = wanted.have if not wanted.whole and wanted.have <= file.size else 0
            if at and digest(descriptor, 0, at) != wanted.sum:
                at = 0
            self.progress.add(at)
            self.contents(number, descriptor, at, total, path)
        finally:
            os.close(descriptor)

    def contents(self, number: int, descriptor: int, at: int, total: str, path: str) -> None:
        """Send a file from an offset on; the last request has the checksum of all of it."""
        size = self.cargo.files[number].size
        while True:
            data = os.pread(descriptor, min(PIECE, size - at), at) if at < size else b""
            over = at + len(data) >= size or not data
            request = WriteFile(number=number, offset=at, sum=total if over else "")
            if data:
                self.channel.put(data, PUT_SECONDS)
            self.pipeline.ask(request, partial(self.done, path, False) if over else self.written)
            at += len(data)
            self.result.size += len(data)
            self.progress.add(len(data))
            if over:
                return

    def written(self, answer: Nothing | None, why: str) -> None:
        """Pass over the answer to a piece: the last one tells what has become of the file."""

    def done(self, path: str, here: bool, answer: Nothing | None, why: str) -> None:
        if answer is None:
            self.result.failed[path] = why
        elif here:
            self.result.kept += 1
        else:
            self.result.sent.append(path)
