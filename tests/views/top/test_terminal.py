"""The terminal is as it was, however the live screen ends; and a reader that leaves ends it."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

TOP = [sys.executable, "-m", "orchestrator", "top", "--nodes", "nodes.txt"]
BACK = b"\x1b[?1049l"


@contextlib.contextmanager
def program(command: list[str], where: Path, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, cwd=where, **more) as running:
        try:
            yield running
        finally:
            running.kill()


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    # No server listens on this port.
    (tmp_path / "nodes.txt").write_text("127.0.0.1:1\n")
    return tmp_path


@pytest.mark.parametrize("how", ["q", "ctrl+c", "a kill"])
def test_terminal_is_restored(nodes: Path, how: str) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "60", "LINES": "15"}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    shown = b""

    def read() -> bytes:
        return os.read(ours, 1 << 16) if select.select([ours], [], [], 0.1)[0] else b""

    with program(TOP, nodes, env=env, **streams) as top:
        # The mouse is the last that textual switches on.
        while not (b"1 node" in shown and b"[?1006h" in shown) and top.poll() is None:
            shown += read()
        assert b"\x1b[?1049h" in shown and termios.tcgetattr(theirs) != before
        if how == "a kill":
            top.send_signal(signal.SIGTERM)
            # The `timeout` command also sends this signal.
            top.send_signal(signal.SIGCONT)
        else:
            os.write(ours, b"q" if how == "q" else b"\x03")
        while (more := read()) or top.poll() is None:
            shown += more
    after = termios.tcgetattr(theirs)
    os.close(theirs)
    os.close(ours)
    assert after == before
    left = shown.rpartition(BACK)
    assert left[1] and not re.search(rb"\[\?(1000|1003|1006|1049|2004)h", left[2])
    assert top.returncode == (130 if how == "a kill" else 0)


def test_closed_pipe_ends_top(nodes: Path) -> None:
    command = [*TOP, "--json", "--watch", "--every", "1"]
    pipe = subprocess.PIPE
    with program(command, nodes, stdout=pipe, stderr=pipe) as top:
        assert top.stdout is not None and top.stderr is not None
        assert json.loads(top.stdout.readline())["nodes"][0]["reached"] is False
        top.stdout.close()
        assert top.wait(60) == 128 + signal.SIGPIPE
        assert top.stderr.read() == b""
