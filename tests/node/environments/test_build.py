"""An environment is made by one at a time; what a killed server was running ends with it."""

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.node.environments.build import Build
from orchestrator.node.transfer.store import Store
from orchestrator.protocol.requests.environments import BuildEnvironment
from tests.node.running import alive, wait_until

KEY = "0123456789abcdef"
# A server whose installer never ends by itself.
SERVER = """
import sys
from orchestrator.node.environments import build
from orchestrator.node.transfer.store import Store
from orchestrator.protocol.requests.environments import BuildEnvironment

key, at_work = sys.argv[1:]
program = ["sh", "-c", f"echo $$ > {at_work}.new; mv {at_work}.new {at_work}; exec sleep 1000"]
build.Build._make = lambda self: build.call_program(program)
build.Build(BuildEnvironment(key=key, tree="", name=""), Store()).thread.join()
"""


def test_build_resumes_after_killed_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path))
    at_work = tmp_path / "at_work"
    server = subprocess.Popen([sys.executable, "-c", SERVER, KEY, str(at_work)])
    wait_until(at_work.exists)
    made: list[str] = []
    monkeypatch.setattr(Build, "_make", lambda build: made.append(build.request.key))
    build = Build(BuildEnvironment(key=KEY, tree="", name=""), Store())
    wait_until(lambda: build.step == "waits for another bootstrap")
    assert build.thread.is_alive() and not made
    server.kill()
    server.wait()
    build.thread.join(30.0)
    assert made == [KEY]
    wait_until(lambda: not alive(int(at_work.read_text())))
