"""A real HTTP server that gets what webhooks are sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver(BaseHTTPRequestHandler):
    got: list[tuple[str, dict[str, Any]]]
    hold: threading.Event

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.got.append((self.path, body))
        if self.path == "/slow":
            self.hold.wait(60)
        self.send_response({"/moved": 302, "/gone": 404}.get(self.path, 200))
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def receiving() -> Iterator[tuple[str, type[Receiver]]]:
    """Give the URL of a server, and the class that has what it got, as (path, body)."""
    kind = type("Kind", (Receiver,), {"got": [], "hold": threading.Event()})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}", kind
        finally:
            kind.hold.set()
            listening.shutdown()
            thread.join()
