"""An environment is made by one at a time, also where the server that began it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.node.environments.build import Build
from orchestrator.protocol.requests.environments import BuildEnvironment

KEY = "0123456789abcdef"
# A server whose installer waits until somebody says that it may end.
SERVER = """
import os, sys
from orchestrator.node.environments.build import Build
from orchestrator.protocol.requests.environments import BuildEnvironment

Build._make = lambda self: self._call(["sh", "-c", "echo $$ > at_work; read line < may_end"])
request = BuildEnvironment(key=sys.argv[1], tree="", root=sys.argv[2], name="")
Build(request).thread.join()
"""


def test_what_a_killed_server_left_at_work_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    os.mkfifo(tmp_path / "may_end")
    root = str(tmp_path / "environments")
    server = subprocess.Popen([sys.executable, "-c", SERVER, KEY, root], cwd=tmp_path)
    until = time.monotonic() + 30.0
    while not (tmp_path / "at_work").exists() and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    made: list[str] = []
    monkeypatch.setattr(Build, "_make", lambda build: made.append(build.request.key))
    build = Build(BuildEnvironment(key=KEY, tree="", root=root, name=""))
    while build.step != "waits for another bootstrap" and build.thread.is_alive():
        build.thread.join(0.01)
    assert build.thread.is_alive() and not made
    (tmp_path / "may_end").write_text("now\n")
    build.thread.join(30.0)
    assert made == [KEY]
