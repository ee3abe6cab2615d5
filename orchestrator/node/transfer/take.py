"""Takes files from another node, in a thread of its own: the node's server goes on answering."""

from __future__ import annotations

import errno
import os
import socket
import threading

from orchestrator.node.peers.signed_connection import Broken
from orchestrator.node.transfer.receive import IncomingFiles
from orchestrator.node.transfer.wire import NodeWire
from orchestrator.protocol.requests.transfer import FilePart, GivingNode, TakeProgress

# For each address: a firewall that answers nothing is no long wait.
DIAL_SECONDS = 2.0
END_SECONDS = 5.0


def call(giver: GivingNode) -> NodeWire:
    """Call the first address where a node answers that has the token; else raise Broken."""
    problems: list[str] = []
    for address in giver.addresses:
        try:
            connection = socket.create_connection((address, giver.port), timeout=DIAL_SECONDS)
        except OSError as error:
            problems.append(f"{address}: {why(error)}")
            continue
        wire = NodeWire(connection, giver.token, "spoke")
        try:
            wire.greet()
        except (Broken, ValueError) as broken:
            wire.close()
            problems.append(f"{address}: {broken}")
            continue
        return wire
    raise Broken("; ".join(problems) or "there is no address to call")


def why(error: OSError) -> str:
    if isinstance(error, socket.timeout):  # before Python 3.10 it is no TimeoutError
        return f"no answer in {DIAL_SECONDS:g} s"
    known = isinstance(error.errno, int) and error.errno in errno.errorcode
    return os.strerror(error.errno).lower() if known and error.errno else str(error)


class Taking:
    """A transfer from another node; `size` counts the bytes that have come."""

    def __init__(self, incoming: IncomingFiles, giver: GivingNode) -> None:
        self.incoming, self.giver = incoming, giver
        self.size = 0
        self.wire: NodeWire | None = None
        self.problem = ""
        self.over = threading.Event()
        self.ended = False
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        try:
            self.wire = call(self.giver)
            if self.ended:
                raise Broken("it is no longer wanted")
            self.fill(self.wire)
        except Exception as error:  # noqa: BLE001  The head hears of it, whatever it is.
            self.problem = str(error) or type(error).__name__
        finally:
            if self.wire is not None:
                self.wire.close()
            self.incoming.abandon()
            self.over.set()

    def fill(self, wire: NodeWire) -> None:
        """Receive the missing files of the manifest; note which could not come or be written."""
        incoming, problems = self.incoming, list[str]()
        wanted = sorted(incoming.missing)
        wire.send({"files": [number for number in wanted if incoming.size(number)]})
        for number in wanted:
            at, size = 0, incoming.size(number)
            if not size:
                incoming.put(FilePart(number, 0, 0), memoryview(b""))
            while at < size:
                piece = wire.receive()
                if isinstance(piece, dict):
                    path = os.fsdecode(incoming.target.entries[number].path)
                    problems.append(f"it has no {path}")
                    break
                if piece:
                    incoming.put(FilePart(number, at, len(piece)), memoryview(piece))
                at += len(piece)
                self.size += len(piece)
        self.problem = next(iter([*problems, *incoming.failed.values()]), "")

    def progress(self, seconds: float) -> TakeProgress:
        """Return the progress, at the end or after some seconds."""
        over = self.over.wait(seconds)
        return TakeProgress(size=self.size, over=over, problem=self.problem)

    def end(self) -> None:
        """Abort the transfer, and wait until nothing more is written."""
        self.ended = True
        if self.wire is not None:
            self.wire.close()
        self.over.wait(END_SECONDS)
