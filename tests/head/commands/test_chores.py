"""What `orchestrator exec` takes for the input of its programs, and what it does not."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.head.commands.machines.exec import standard_input, unread_pipe


def test_a_pipe_that_no_node_gets_is_noticed() -> None:
    reading, writing = os.pipe()
    known = os.dup(0)
    try:
        os.dup2(reading, 0)
        assert not unread_pipe()  # open, as in CI, and nobody says anything
        os.write(writing, b"x")
        assert unread_pipe() and standard_input() is None
        with Path(os.devnull).open("rb") as file:
            os.dup2(file.fileno(), 0)
        assert not unread_pipe()
    finally:
        os.dup2(known, 0)
        for descriptor in (known, reading, writing):
            os.close(descriptor)
