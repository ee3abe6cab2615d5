"""A connection of fabric's is made for one login, beside many others."""

from pathlib import Path

from orchestrator.head.connect import fabric_login
from orchestrator.head.connect.ssh_config import SshConfig


def test_connections_share_no_config() -> None:
    """fabric writes into it while it makes one, and 32 threads had stumbled over that."""
    there = SshConfig(Path("/dev/null")).destination("127.0.0.1")
    first, second = (fabric_login.prepared(there, False, strict=False) for _ in range(2))
    assert first.config is not second.config
