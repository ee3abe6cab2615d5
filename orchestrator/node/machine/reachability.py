"""Tests whether the nodes really reach each other: one listens and sends a word, others connect.

Only the right word counts as an answer: an address that two machines have, or a proxy that accepts
everything, does not lead to the node. A caller then sends data in packets of full size: if those
are lost, ranks connect and then hang. A listener lives as long as this program, or less.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from typing import Optional

from orchestrator.node.server.ports import listening_socket
from orchestrator.protocol.requests.machine import LARGE_LOST, Dial, Listen

AT_ONCE = 64
WORD_BYTES = 64
# This fills several packets of any size.
BULK_BYTES = 1 << 16
# A listener waits this long for the data.
BULK_SECONDS = 10.0
# The listener's answer once all data has arrived.
ARRIVED = b"+"


def listen_on_ports(request: Listen) -> tuple[int, ...]:
    """Open the ports (0 for any) and return their numbers; 0 for one that is taken."""
    word = request.word.encode()
    return tuple(start_listener(port, word, request.seconds) for port in request.ports)


def start_listener(port: int, word: bytes, seconds: Optional[float] = None) -> int:
    try:
        server = listening_socket(port)
    except OSError:
        return 0
    threading.Thread(target=answer_caller, args=(server, word, seconds), daemon=True).start()
    number: int = server.getsockname()[1]
    return number


def answer_caller(server: socket.socket, word: bytes, seconds: Optional[float]) -> None:
    until = math.inf if seconds is None else time.monotonic() + seconds
    with server, contextlib.suppress(OSError):
        while (left := until - time.monotonic()) > 0:
            server.settimeout(None if left == math.inf else left)
            caller, _ = server.accept()
            threading.Thread(target=serve_caller, args=(caller, word), daemon=True).start()


def serve_caller(caller: socket.socket, word: bytes) -> None:
    """Send the word, and confirm when all data of the caller has arrived."""
    with caller, contextlib.suppress(OSError):
        caller.settimeout(BULK_SECONDS)
        caller.sendall(word)
        left = BULK_BYTES
        while left and (data := caller.recv(left)):
            left -= len(data)
        if not left:
            caller.sendall(ARRIVED)


def dial_addresses(request: Dial) -> tuple[str, ...]:
    """Connect to every address; return the reason of each failure, or an empty string."""
    # The probe does not need this import.
    from concurrent.futures import ThreadPoolExecutor

    if not request.places:
        return ()
    with ThreadPoolExecutor(min(AT_ONCE, len(request.places))) as pool:
        return tuple(
            pool.map(lambda p: call_address(p[0], p[1], p[2], request.seconds), request.places)
        )


def call_address(address: str, port: int, word: str, seconds: float) -> str:
    try:
        with socket.create_connection((address, port), timeout=seconds) as line:
            heard = b""
            while len(heard) < len(word):
                data = line.recv(WORD_BYTES)
                if not data:
                    break
                heard += data
            if word and heard == word.encode():
                return send_much(line)
    except socket.timeout:
        return f"no answer in {seconds:g} s"
    except OSError as error:
        return os.strerror(error.errno).lower() if error.errno else str(error)
    return "" if heard == word.encode() else "something else answers there"


def send_much(line: socket.socket) -> str:
    """Return an empty string once the listener has received all data, else the reason."""
    try:
        line.sendall(bytes(BULK_BYTES))
        return "" if line.recv(1) == ARRIVED else "it hung up"
    except socket.timeout:
        return LARGE_LOST
