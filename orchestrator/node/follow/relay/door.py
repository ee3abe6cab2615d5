"""The door through which a head comes in again, by way of a relay, while its SSH connection ends.

A node waits at a free port, for as long as the head says. The first caller that proves to be the
head takes the place of the SSH channel, and the port is closed.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from typing import NamedTuple

from orchestrator.node.follow.relay.sealed import Sealed, context, received, some
from orchestrator.node.follow.relay.signed import Signed
from orchestrator.node.peers.peers import listen
from orchestrator.node.server.ports import Ports
from orchestrator.node.server.visit import Refusal, RoomState
from orchestrator.protocol.requests.follow import OpenDoor

STRANGERS = 16  # who call and have proved nothing yet
LATE_SECONDS = 5.0  # from our proof, which the head has seen, until it is let in
MOST_BYTES = 1 << 19  # that wait for one end before the other one is not read any more


class Doors(RoomState):
    """The one door of a visit."""

    door: Door | None = None

    def open(self, request: OpenDoor) -> int:
        self.leave()
        listener = listen(avoid=self.visit.of(Ports).number)
        if listener is None:
            raise Refusal("this node may not listen at any port")
        self.door = Door(request, listener)
        return self.door.port

    def come_in(self) -> socket.socket:
        """Return what reads as the head's words, and takes ours."""
        if self.door is None:
            raise Refusal("there is no door here")
        guest = self.door.come_in()
        ours, inner = socket.socketpair()
        threading.Thread(target=carry, args=(guest, inner), daemon=True).start()
        return ours

    def leave(self) -> None:
        if self.door is not None:
            self.door.close()
            self.door = None


class Guest(NamedTuple):
    """The connection by which the head has come in."""

    caller: socket.socket
    sealed: Sealed  # with the relay
    signed: Signed  # with the head
    said: bytes

    def open(self, data: bytes) -> bytes:
        """Take what came; return what the head says with it."""
        return self.signed.open(self.sealed.open(data))

    def seal(self, data: bytes) -> bytes:
        """Return what has to be sent so that the head reads this."""
        return self.sealed.seal(self.signed.seal(data))


class Door:
    """A port, and who came in."""

    def __init__(self, request: OpenDoor, listener: socket.socket) -> None:
        self.context = context(request.identity, request.authority, calls=False)
        self.key = bytes.fromhex(request.key)
        self.deadline = time.monotonic() + request.seconds
        self.listener = listener
        self.port = int(self.listener.getsockname()[1])
        self.places = threading.BoundedSemaphore(STRANGERS)
        self.changing = threading.Lock()
        self.guest: Guest | None = None
        self.came = threading.Event()
        threading.Thread(target=self.wait, daemon=True).start()

    def wait(self) -> None:
        """Let each caller prove itself, until one has, or it is time."""
        with contextlib.suppress(OSError):  # closed
            while (left := self.deadline - time.monotonic()) > 0 and not self.came.is_set():
                self.listener.settimeout(left)
                caller = self.listener.accept()[0]
                if self.places.acquire(blocking=False):
                    threading.Thread(target=self.hear, args=(caller,), daemon=True).start()
                else:
                    caller.close()
        self.listener.close()

    def hear(self, caller: socket.socket) -> None:
        """Find out whether a caller is a relay with the head behind it."""
        sealed, signed = Sealed(self.context), Signed(self.key, calls=False)
        try:
            said = signed.open(sealed.agree(caller, self.deadline))
            while not signed.proved:
                said += signed.open(sealed.open(some(caller, self.deadline)))
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            guest = Guest(caller, sealed, signed, said)
            caller.sendall(guest.seal(b""))
        except OSError:
            caller.close()
        else:
            self.let_in(guest)
        finally:
            self.places.release()

    def let_in(self, guest: Guest) -> None:
        with self.changing:
            if self.came.is_set():
                guest.caller.close()
                return
            self.guest = guest
            self.came.set()
        self.close()

    def come_in(self) -> Guest:
        """Return the one who came in."""
        if not self.came.wait(LATE_SECONDS) or self.guest is None:
            raise Refusal("the head did not come through the relay")
        guest, self.guest = self.guest, None
        return guest

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # ends the thread that waits there
        self.listener.close()


def carry(guest: Guest, inner: socket.socket) -> None:
    """Carry between the connection to the relay and the plain one until either ends."""
    outer, said, goes = guest.caller, guest.said, b""
    with outer, inner, contextlib.suppress(OSError):
        for end in (outer, inner):
            end.setblocking(False)
        while True:
            poll = select.poll()
            poll.register(outer, wanted(reads=len(said) < MOST_BYTES, writes=bool(goes)))
            poll.register(inner, wanted(reads=len(goes) < MOST_BYTES, writes=bool(said)))
            ready = dict(poll.poll())
            if goes and ready.get(outer.fileno(), 0) & ~select.POLLIN:
                goes = goes[outer.send(goes) :]
            if said and ready.get(inner.fileno(), 0) & ~select.POLLIN:
                said = said[inner.send(said) :]
            if ready.get(outer.fileno(), 0) & ~select.POLLOUT:
                said += guest.open(received(outer))
            if ready.get(inner.fileno(), 0) & ~select.POLLOUT:
                goes += guest.seal(received(inner))


def wanted(*, reads: bool, writes: bool) -> int:
    return select.POLLIN * reads | select.POLLOUT * writes
