"""Takes files from another node, in a thread of its own: the node's server goes on meanwhile."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from orchestrator.node.peers.signed_connection import Broken
from orchestrator.node.transfer.give import RECORD
from orchestrator.node.transfer.receive import LIST, Incoming
from orchestrator.node.transfer.wire import ASK, Wire
from orchestrator.protocol import manifest
from orchestrator.protocol.requests.transfer import GivingNode, Part, Take, Taken

DIAL_SECONDS = 2.0  # for each address: a firewall that answers nothing is no long wait
GROUP_FILES = 256  # asked for at once,
GROUP_BYTES = 1 << 14  # so that the question fits into the buffers of a connection
END_SECONDS = 5.0
AHEAD = 2  # groups: the next is on its way while one comes


class Caller:
    """A connection to a node that gives."""

    def __init__(self, addresses: Sequence[str], port: int, token: str, seconds: float) -> None:
        """Call the first address where somebody answers who has the token; else raise Broken."""
        deadline = time.monotonic() + seconds
        problems: list[str] = []
        for address in addresses:
            try:
                connection = socket.create_connection((address, port), timeout=DIAL_SECONDS)
            except OSError as error:
                problems.append(f"{address}: {why(error)}")
                continue
            self.wire = Wire(connection, token, "spoke", deadline)
            try:
                self.wire.greet()
            except Broken as broken:
                self.wire.close()
                problems.append(f"{address}: {broken}")
                continue
            return
        raise Broken("; ".join(problems) or "there is no address to call")

    def fetch(
        self,
        wanted: Sequence[tuple[str, int]],
        take: Callable[[str, memoryview], None],
        absent: Callable[[str], None] | None = None,
    ) -> None:
        """Fetch files (name, size); take() gets their contents, one after the other, in pieces.

        absent() hears of those that are not there; without it the first one is an error.
        """
        groups = list(in_groups(wanted))
        for group in groups[:AHEAD]:
            self.ask(group)
        for number, group in enumerate(groups, AHEAD):
            for name, size in group:
                here, count = RECORD.unpack(b"".join(self.wire.pieces(RECORD.size)))
                if not here and absent is not None:
                    absent(name)
                    continue
                if not here or count != size:
                    raise Broken(f"it has no {name} of {size} bytes")
                for piece in self.wire.pieces(size) if size else (memoryview(b""),):
                    take(name, piece)
            if number < len(groups):
                self.ask(groups[number])

    def ask(self, group: Sequence[tuple[str, int]]) -> None:
        self.wire.send(ASK, json.dumps([name for name, _ in group]).encode("ascii"))

    def close(self) -> None:
        self.wire.close()


def why(error: OSError) -> str:
    if isinstance(error, socket.timeout):  # before Python 3.10 it is no TimeoutError
        return f"no answer in {DIAL_SECONDS:g} s"
    known = isinstance(error.errno, int) and error.errno in errno.errorcode
    return os.strerror(error.errno).lower() if known and error.errno else str(error)


def in_groups(wanted: Iterable[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    group: list[tuple[str, int]] = []
    count = 0
    for name, size in wanted:
        group.append((name, size))
        count += len(name)
        if len(group) == GROUP_FILES or count > GROUP_BYTES:
            yield group
            group, count = [], 0
    if group:
        yield group


class Taking:
    """Work in a thread that takes files; `seen` counts their bytes."""

    def __init__(self, work: Callable[[Taking], None]) -> None:
        self.work = work
        self.seen = 0
        self.incoming: Incoming | None = None
        self.caller: Caller | None = None
        self.problem = ""
        self.ended = False
        self.over = threading.Event()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        try:
            self.work(self)
        except Exception as error:  # noqa: BLE001  the head hears of it, whatever it is
            self.problem = str(error) or type(error).__name__
        finally:
            if self.caller is not None:
                self.caller.close()
            self.over.set()

    def call(self, giver: GivingNode, seconds: float) -> Caller:
        """Connect to the node that gives."""
        self.caller = Caller(giver.addresses, giver.port, giver.token, seconds)
        if self.ended:
            raise Broken("it is no longer wanted")
        return self.caller

    def fill(self, caller: Caller, incoming: Incoming) -> None:
        """Fetch what is lacking of a manifest; note what could not be written."""
        entries, at = incoming.target.entries, dict.fromkeys(incoming.missing, 0)
        at.update((half.number, half.have) for half in incoming.lacking.begun if not half.whole)
        wanted = [(f"{n}:{at[n]}", entries[n].size - at[n]) for n in sorted(incoming.missing)]
        absent: list[str] = []

        def write(name: str, piece: memoryview) -> None:
            number = int(name.partition(":")[0])
            incoming.put(Part(number, at[number], len(piece)), piece)
            at[number] += len(piece)
            self.seen += len(piece)

        try:
            caller.fetch(wanted, write, absent.append)
        finally:
            incoming.abandon()
        for name in absent:
            path = os.fsdecode(entries[int(name.partition(":")[0])].path)
            self.problem = self.problem or f"it has no {path}"
        self.problem = self.problem or next(iter(incoming.failed.values()), "")

    def progress(self, seconds: float) -> Taken:
        """Say how far it is, at its end or after some seconds."""
        over = self.over.wait(seconds)
        lacking = None
        if over and self.incoming is not None:
            lacking = self.incoming.lacking.replace(failed=self.incoming.failed)
        return Taken(size=self.seen, over=over, problem=self.problem, lacking=lacking)

    def end(self) -> None:
        """Give up what is under way, and wait until nothing more is written."""
        self.ended = True
        if self.caller is not None:
            self.caller.close()
        self.over.wait(END_SECONDS)


def take(request: Take, into: Callable[[bytes], Incoming]) -> Taking:
    """Begin to take what is lacking of a manifest, which the other node gives, too."""

    def work(taking: Taking) -> None:
        caller, received = taking.call(request.giver, request.seconds), bytearray()
        caller.fetch([(LIST, request.size)], lambda _, piece: received.extend(piece))
        listing = bytes(received)
        if manifest.digest_of(listing) != request.manifest:
            raise ValueError("the list of the files was damaged on its way")
        incoming = taking.incoming = into(listing)
        incoming.compare()
        taking.fill(caller, incoming)

    return Taking(work)
