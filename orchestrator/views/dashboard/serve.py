"""Runs the dashboard on a socket, until Ctrl-C."""

from __future__ import annotations

import os
import socket

import uvicorn
from starlette.applications import Starlette

from orchestrator.common.errors import UsageError

PORT = 8321
GOODBYE = 1  # seconds that clients have who look on when it ends


def listen(host: str, port: int | None) -> socket.socket:
    """Open the port; where none is wanted, the usual one or any that is free."""
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "no name of a machine"
        raise UsageError(f"--host {host}: {why}", "give an address of this machine") from None
    for wanted in [PORT, 0] if port is None else [port]:
        try:
            return socket.create_server((host, wanted), family=family)
        except OSError as error:
            problem = os.strerror(error.errno) if error.errno else str(error)
    raise UsageError(f"{host} port {port or PORT}: {problem}", "choose another: --port 0 takes any")


def serve(app: Starlette, listening: socket.socket) -> None:
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # the first address has the token
        server_header=False,
        timeout_graceful_shutdown=GOODBYE,
        limit_concurrency=400,
    )
    uvicorn.Server(config).run(sockets=[listening])
