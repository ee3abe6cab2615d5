"""An environment is made on a node whose server is real, and only where it is not whole."""

import subprocess
from pathlib import Path

import pytest

from orchestrator.head.connect.reach import Reached, open_channel
from orchestrator.head.connect.subprocess_transport import LocalTransport
from orchestrator.head.environments import command, wheels
from orchestrator.head.nodes.node_list import Node
from tests.head.environments.test_requirements import wheel
from tests.head.plan.probed import facts

pytestmark = pytest.mark.slow


def test_make_builds_environment_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    home = tmp_path / "its home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # A user may have set this, and it is wrong in an environment.
    monkeypatch.setenv("PIP_USER", "1")
    wheel(tmp_path, "mine", "1.0")
    file = tmp_path / "requirements.txt"
    file.write_text("mine\n")
    sources = wheels.read_requirements((str(file),), (str(tmp_path),), index=False)
    transport = LocalTransport()
    connection = transport.connect(Node("a"))
    node = Reached(Node("a"), facts(), open_channel(connection, Node("a"), 30.0))
    try:
        (outcome,) = command.make_environments([node], sources, "mine")
        assert outcome.made, outcome.problem
        assert outcome.packages["mine"] == "1.0"
        program = [f"{home}/environments/mine/bin/python", "-c", "import mine; print(mine.version)"]
        assert subprocess.check_output(program, text=True) == "1.0\n"
        (again,) = command.make_environments([node], sources)
        assert not again.made and again.packages == outcome.packages
        assert not list((home / "code/snapshots").iterdir())
    finally:
        connection.close()
    assert "a: pip installs 1 wheel" in said
