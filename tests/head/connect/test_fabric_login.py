"""A connection of fabric's is made for one login, beside many others, and waits for no timer."""

import socket
from pathlib import Path

from orchestrator.head.connect import fabric_login
from tests.head.connect.test_dial import known


def test_connections_share_no_config(tmp_path: Path) -> None:
    """fabric writes into it while it makes one, and 32 threads had stumbled over that."""
    there = known(tmp_path, "127.0.0.1", 22)
    first, second = (fabric_login.prepare_connection(there, False) for _ in range(2))
    assert first.config is not second.config


def test_transport_sends_and_acknowledges_at_once() -> None:
    """A plain socket delays its acknowledgements once it has answered a few times."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = socket.create_connection(server.getsockname())
        plain, _ = server.accept()
    prompt = fabric_login.new_transport([], caller).sock
    with prompt, plain:
        for sender, receiver in [(prompt, plain), (plain, prompt)] * 3:
            sender.sendall(b"x")
            receiver.recv(1)
        for option in (socket.TCP_NODELAY, socket.TCP_QUICKACK):
            values = [each.getsockopt(socket.IPPROTO_TCP, option) for each in (prompt, plain)]
            assert values == [1, 0]
