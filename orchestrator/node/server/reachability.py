"""Whether the nodes really reach each other: a listener that says a word, and calls that want it.

Only the right word counts as an answer: an address that two machines have, or a proxy that accepts
everything, is no way to the node. The listener lives as long as this link.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

AT_ONCE = 64
WORD = 64  # bytes at most


def listen(request: dict[str, Any]) -> dict[str, Any]:
    """{"ports": [0 for any, or a number], "word"} -> the ports; 0 for one that is taken."""
    return {"ports": [listener(port, request["word"].encode()) for port in request["ports"]]}


def listener(port: int, word: bytes) -> int:
    try:
        server = bound(port)
    except OSError:
        return 0
    threading.Thread(target=answer, args=(server, word), daemon=True).start()
    number: int = server.getsockname()[1]
    return number


def bound(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise  # else IPv6 is switched off here
    return socket.create_server(("", port), backlog=128)


def answer(server: socket.socket, word: bytes) -> None:
    while True:
        try:
            caller, _ = server.accept()
        except OSError:
            return
        with caller:
            try:
                caller.settimeout(2)
                caller.sendall(word)
            except OSError:
                continue


def dial(request: dict[str, Any]) -> dict[str, Any]:
    """{"places": [[address, port, word]], "seconds"} -> for each why not, or ""."""
    places, seconds = request["places"], request["seconds"]
    if not places:
        return {"answers": []}
    with ThreadPoolExecutor(min(AT_ONCE, len(places))) as pool:
        return {
            "answers": list(pool.map(lambda one: call(one[0], one[1], one[2], seconds), places))
        }


def call(address: str, port: int, word: str, seconds: float) -> str:
    try:
        with socket.create_connection((address, port), timeout=seconds) as line:
            heard = b""
            while len(heard) < len(word):
                data = line.recv(WORD)
                if not data:
                    break
                heard += data
    except socket.timeout:  # noqa: UP041  before Python 3.10 it is no TimeoutError
        return f"no answer in {seconds:g} s"
    except OSError as error:
        return os.strerror(error.errno).lower() if error.errno else str(error)
    return "" if heard == word.encode() else "something else answers there"
