"""Serve the exposition to Prometheus: /metrics, and nothing else."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from orchestrator.common.errors import UsageError
from orchestrator.common.hosts import is_this_machine
from orchestrator.views.track.exposition import Exposition

PATIENCE = 10.0  # seconds that a client may take for its request, and for the answer
CLIENTS = 16  # at the same time; others are hung up on


class Server(ThreadingHTTPServer):
    """Answers one look after the other: several at once would read the same files."""

    daemon_threads = True

    def __init__(self, place: tuple[str, int], exposition: Exposition, token: str) -> None:
        self.exposition, self.token = exposition, token
        self.one_at_a_time = threading.Lock()
        self.room = threading.Semaphore(CLIENTS)
        self.address_family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        try:
            super().__init__(place, Answer)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"port {place[1]} of {place[0]} cannot be listened on:"
                f" {getattr(error, 'strerror', None) or error}",
                "name another one with --port",
            ) from error

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, as long as there is room: one that says nothing has some, too."""
        if not self.room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be had
            self.room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.room.release()

    def handle_error(self, *_: Any) -> None:
        """A client that is gone is nothing to tell."""


class Answer(BaseHTTPRequestHandler):
    server: Server
    timeout = PATIENCE
    server_version, sys_version = "orchestrator", ""

    def handle(self) -> None:
        """Hang up on one that has not asked in time: `timeout` is for each of its bytes."""
        self.late = threading.Timer(PATIENCE, self.hang_up)
        self.late.daemon = True
        self.late.start()
        try:
            super().handle()
        finally:
            self.late.cancel()

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):  # it is gone already
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        self.late.cancel()
        if not self.server.token and not is_this_machine(self.headers.get("Host", "")):
            self.send_error(421, "another machine is meant")
        elif not self.may_read():
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Bearer")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is here")
        else:
            with self.server.one_at_a_time:
                body = self.server.exposition.text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def may_read(self) -> bool:
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        token = self.server.token
        return not token or hmac.compare_digest(given, f"Bearer {token}".encode())

    def log_message(self, *_: Any) -> None:
        """Say nothing of each look."""
