"""Serves an app over HTTP until Ctrl-C: the dashboard, and the metrics for Prometheus."""

from __future__ import annotations

import os
import socket

import uvicorn
from starlette.applications import Starlette

from orchestrator.common.errors import UsageError

# The time that clients have to read their responses when the server ends.
SHUTDOWN_SECONDS = 1
MOST_CLIENTS = 400


def listen_on_port(host: str, *ports: int) -> socket.socket:
    """Open the first of these ports that is free."""
    problem = ""
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no name of a machine"
        raise UsageError(f"--host {host}: {reason}", "give an address of this machine") from None
    for port in ports:
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            problem = os.strerror(error.errno) if error.errno else str(error)
    raise UsageError(f"{host} port {ports[0]}: {problem}", "choose another: --port 0 takes any")


def serve_app(app: Starlette, listening: socket.socket) -> None:
    config = uvicorn.Config(
        app,
        ws="none",
        # Any user of this machine can cause warnings.
        log_level="error",
        # The first address contains the token.
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        limit_concurrency=MOST_CLIENTS,
    )
    uvicorn.Server(config).run(sockets=[listening])
