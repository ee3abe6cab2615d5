"""Passes files of a manifest from one node to another, over TCP.

Both sides prove that they have the token that the head gave them, as multiprocessing's listeners
do. What follows is neither signed nor encrypted, as what ranks send each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from orchestrator.node.peers.peers import listen
from orchestrator.node.transfer.receive import IncomingFiles
from orchestrator.protocol.requests.transfer import FilePart, GivingNode, TakeProgress

# For each address: a firewall that answers nothing is no long wait.
DIAL_SECONDS = 2.0
# Without a byte for so long, the other side or the way to it is lost, or a caller's disk is.
QUIET_SECONDS, PATIENCE_SECONDS = 5, 60
# A caller that waits for a file hears so often that it is still to come.
BEAT_SECONDS = 0.5
END_SECONDS = 5.0
PIECE_BYTES = 1 << 18
# The first byte of an answer: bytes of a file follow, it is still to come, or it is not here.
DATA, TO_COME, ABSENT = b"d", b"c", b"a"


@contextlib.contextmanager
def opened(sock: socket.socket, token: str, *, called: bool) -> Iterator[Connection]:
    """Yield a line over which both sides have proved that they have the token."""
    key = bytes.fromhex(token)
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", QUIET_SECONDS, 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", PATIENCE_SECONDS, 0))
    with Connection(os.dup(sock.fileno())) as line:
        for prove in (deliver_challenge, answer_challenge)[:: 1 if called else -1]:
            prove(line, key)
        yield line


def hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # This wakes the thread that waits here.
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class Giver:
    """Listens at `port`, which is 0 where that is denied; each caller has a thread."""

    def __init__(self, token: str, files: Callable[[], IncomingFiles]) -> None:
        self.token, self.files = token, files
        self.sockets: set[socket.socket] = set()
        self.lock = threading.Lock()
        self.server = listen(0)
        self.port: int = self.server.getsockname()[1] if self.server else 0
        if self.server is not None:
            self.sockets.add(self.server)
            threading.Thread(target=self.accept, args=(self.server,), daemon=True).start()

    def accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # It was closed.
            while True:
                sock, _ = server.accept()
                threading.Thread(target=self.serve, args=(sock,), daemon=True).start()

    def serve(self, sock: socket.socket) -> None:
        """Give one caller the files that it asks for; a stranger gets a random number."""
        with self.lock:
            self.sockets.add(sock)
        # An error: the caller has all, or says at its own end what is wrong.
        known = (OSError, EOFError, AuthenticationError, ValueError, TypeError)
        with contextlib.suppress(*known), opened(sock, self.token, called=True) as line:
            for number in json.loads(line.recv_bytes()):
                self.give(line, number)
            line.recv_bytes()
        with self.lock:
            self.sockets.discard(sock)
        hang_up(sock)

    def give(self, line: Connection, number: int) -> None:
        """Send a file, once it has come here."""
        try:
            while (file := self.files().open(number)) is None:
                line.send_bytes(TO_COME)
                self.files().wait(BEAT_SECONDS)
        except LookupError:
            line.send_bytes(ABSENT)
            return
        with file:
            left = self.files().size(number)
            while left > 0 and (data := file.read(min(left, PIECE_BYTES))):
                line.send_bytes(DATA + data)
                left -= len(data)
            if left:
                raise EOFError("a file became shorter")

    def close(self) -> None:
        with self.lock:
            for sock in self.sockets:
                hang_up(sock)


class Taking:
    """A transfer from another node; `size` counts the bytes that have come."""

    def __init__(self, incoming: IncomingFiles, giver: GivingNode) -> None:
        self.incoming, self.giver = incoming, giver
        self.size = 0
        self.sock: socket.socket | None = None
        self.problem = ""
        self.over = threading.Event()
        self.ended = False
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        """Take the files from the first address where the giver answers."""
        problems = []
        try:
            for address in self.giver.addresses:
                problem = self.take_from(address)
                if not problem or self.size or self.ended:
                    problems = [problem]
                    break
                problems.append(f"{address}: {problem}")
            self.problem = "; ".join(filter(None, problems))
        except Exception as error:  # noqa: BLE001  The head hears of it, whatever it is.
            self.problem = str(error) or type(error).__name__
        finally:
            self.incoming.abandon()
            self.over.set()

    def take_from(self, address: str) -> str:
        """Take the files from one address; return why that did not work, or nothing."""
        try:
            self.sock = socket.create_connection((address, self.giver.port), DIAL_SECONDS)
            with self.sock, opened(self.sock, self.giver.token, called=False) as line:
                return "it is no longer wanted" if self.ended else self.fill(line)
        except BlockingIOError:
            return f"silent for {QUIET_SECONDS} s"
        except socket.timeout:  # noqa: UP041  before Python 3.10 it is no TimeoutError
            return f"no answer in {DIAL_SECONDS:g} s"
        except (EOFError, ConnectionError) as error:
            refused = isinstance(error, ConnectionRefusedError)
            return "connection refused" if refused else "it hung up"
        except AuthenticationError:
            return "it does not have the token"
        except OSError as error:
            return error.strerror or str(error)

    def fill(self, line: Connection) -> str:
        """Receive the missing files; return which one could not come or be written."""
        incoming, problems = self.incoming, list[str]()
        wanted = sorted(incoming.missing)
        line.send_bytes(json.dumps([n for n in wanted if incoming.size(n)]).encode("ascii"))
        for number in wanted:
            at, size = 0, incoming.size(number)
            if not size:
                incoming.put(FilePart(number, 0, 0), memoryview(b""))
            while at < size:
                answer = memoryview(line.recv_bytes())
                if answer[:1] == ABSENT:
                    problems.append(f"it has no {os.fsdecode(incoming.entries[number].path)}")
                    break
                piece = answer[1:]
                if piece:
                    incoming.put(FilePart(number, at, len(piece)), piece)
                at += len(piece)
                self.size += len(piece)
        return next(iter([*problems, *incoming.failed.values()]), "")

    def progress(self, seconds: float) -> TakeProgress:
        """Return the progress, at the end or after some seconds."""
        over = self.over.wait(seconds)
        return TakeProgress(size=self.size, over=over, problem=self.problem)

    def end(self) -> None:
        """Abort the transfer, and wait until nothing more is written."""
        self.ended = True
        if self.sock is not None:
            hang_up(self.sock)
        self.over.wait(END_SECONDS)
