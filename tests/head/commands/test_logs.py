"""`orchestrator logs --system`: the files that it shows."""

import os
from pathlib import Path

import pytest

from orchestrator.head.commands.logs import show_files


def test_show_files_refuses_pipe(tmp_path: Path) -> None:
    """Opening a pipe would wait for its writer."""
    os.mkfifo(tmp_path / "server.txt")
    with pytest.raises(OSError, match="not a plain file"):
        show_files("node 0", [tmp_path / "server.txt"], None)
