"""A connection of fabric's is made for one login, beside many others."""

from pathlib import Path

from orchestrator.head.connect import fabric_login
from tests.head.connect.test_dial import known


def test_connections_share_no_config(tmp_path: Path) -> None:
    """fabric writes into it while it makes one, and 32 threads had stumbled over that."""
    there = known(tmp_path, "127.0.0.1", 22)
    first, second = (fabric_login.prepare_connection(there, False) for _ in range(2))
    assert first.config is not second.config
