"""The node list that `orchestrator init` makes, with and without a terminal."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.head.init.machines import node_with_torch
from orchestrator.head.nodes.node_list import Node, read_nodes
from tests.conftest import Cluster
from tests.head.environments.test_requirements import wheel
from tests.head.plan.probed import facts
from tests.launching import BIN, PATIENCE
from tests.typed import typed

pytestmark = pytest.mark.cluster
LIST = "node_ip_list.txt"
# What is asked, and what the user types then; a function is called in place of that.
Step = tuple[str, str | Callable[[], object]]


def dialogue(here: Path, words: list[str], *steps: Step) -> tuple[int, str]:
    """Type `orchestrator init` on a terminal; return its exit code, and all that it showed."""
    terminal, theirs = pty.openpty()
    command = ["setsid", "--ctty", "--wait", str(BIN / "orchestrator"), "init", *words]
    env = {**os.environ, "HOME": str(here.parent), "COLUMNS": "120"}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    shown, mark, left, deadline = b"", 0, list(steps), time.monotonic() + PATIENCE
    with subprocess.Popen(command, cwd=here, env=env, **streams) as process:  # type: ignore[call-overload]
        os.close(theirs)
        while time.monotonic() < deadline:
            try:
                select.select([terminal], [], [], PATIENCE)
                shown += (data := os.read(terminal, 1 << 16))
            except OSError:
                # The command has left and closed the other side of the terminal.
                break
            if not data:
                break
            while left and (at := shown.find(left[0][0].encode(), mark)) >= 0:
                asked, answer = left.pop(0)
                mark = at + len(asked)
                os.write(terminal, answer.encode() if isinstance(answer, str) else answer() or b"")
    os.close(terminal)
    assert not left, shown.decode()
    return process.returncode, shown.decode()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Hints name a command by its path where PATH does not lead to it.
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    (tmp_path / "project").mkdir()
    (tmp_path / "project/my train.py").write_text("print('trains')\n")
    return tmp_path / "project"


def test_init_without_questions_writes_list_that_launches(two_nodes: Cluster, here: Path) -> None:
    reach = ["--ssh-config", str(two_nodes.ssh_config)]
    code, out, err = typed(["init", *two_nodes.addresses, "--yes", *reach], here)
    assert code == 0, err
    lines = (here / LIST).read_text().splitlines()[2:]
    for address, line in zip(two_nodes.addresses, lines, strict=True):
        assert line.startswith(f"{address} ") and "# no GPU: one rank" in line
        assert "torch 2" in line and address in line.partition("#")[2]
    last = out.splitlines()[-1]
    assert last == f"orchestrator: now type: master_launch --ssh-config {reach[1]} 'my train.py'"
    code, out, err = typed(["launch", *reach, "--no-torchrun", "my train.py"], here)
    assert code == 0 and out.count("| trains") == 2, err
    before = (here / LIST).read_bytes()
    code, _, err = typed(["init", two_nodes.addresses[0], "--yes", *reach], here)
    assert code == 2 and f"{LIST} already exists, and is not overwritten" in err
    assert (here / LIST).read_bytes() == before


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (["--yes"], 2, "name the machines: orchestrator init gpu1 gpu2 --yes"),
        (["a b=1", "--yes"], 2, "unknown option 'b=1'"),
        (["127.0.0.1:9", "127.0.0.1:10", "--yes"], 4, "2 of 2 nodes cannot be used; nothing was"),
        (["gpu1", "--nodes", "none/list"], 2, "none/list cannot be written"),
    ],
)
def test_init_that_fails_writes_nothing(words: list[str], code: int, what: str, here: Path) -> None:
    done = typed(["init", *words], here)
    assert done[0] == code and what in done[2]
    assert [path.name for path in here.iterdir()] == ["my train.py"]


def test_wizard_offers_known_machines_and_mends_logins(
    loopback_cluster: Callable[..., Cluster], here: Path
) -> None:
    """A key that is refused at first, a wrong answer, a machine that is left out."""
    cluster = loopback_cluster(3)
    first, second, third = (f"127.0.0.{i}:{cluster.listens_at(0)[1]}" for i in (2, 3, 4))
    cluster.deny_keys(1)
    cluster.kill_sshd(2)
    (here / LIST).write_text("old\n")
    asks = "user@host:port replaces it:"
    code, text = dialogue(
        here,
        ["--ssh-config", str(cluster.ssh_config), "--connect-timeout", "60"],
        ("Write a new one in its place? [y/N]", "y\n"),
        (f"3  {third}", "9\n"),
        ("9 is not a number from 1 to 3", "2,1 3\n"),
        (f"{second}: it denies", lambda: None),
        ("c copies your key there by ssh-copy-id", "c\n"),
        ("Permission denied", lambda: None),
        (f"{third}: it refuses connections", lambda: None),
        (asks, "no such host\n"),
        ("unknown option", "-\n"),
        ("1 of 2 machines let us in", lambda: cluster.allow_keys(1)),
        (asks, "\n"),
    )
    assert code == 0, text
    assert [node.name for node in read_nodes(here / LIST)] == [second, first]
    # Another program of this machine may have the default port, which is a warning.
    assert re.search(r"2 nodes, quick checks, .*: (.*all is well|1 warn)", text)


@pytest.mark.parametrize(
    "steps",
    [
        [("Write a new one in its place? [y/N]", "\x03")],
        [("Write a new one in its place? [y/N]", "y\n"), (">", "\x03")],
        [("Write a new one in its place? [y/N]", "y\n"), (">", "127.0.0.1:9\n"), ("it:", "\x03")],
        [("Write a new one in its place? [y/N]", "y\n"), (">", "\x04")],
        [("Write a new one in its place? [y/N]", "n\n")],
    ],
    ids=["overwrite", "choice", "login", "end of input", "no"],
)
def test_ctrl_c_leaves_old_list_as_it_was(steps: list[Step], here: Path) -> None:
    (here / LIST).write_text("old\n")
    (here.parent / "config").write_text("")
    code, text = dialogue(here, ["--ssh-config", str(here.parent / "config")], *steps)
    wanted = {"\x03": (130, "interrupted"), "\x04": (2, "the input has ended"), "n\n": (0, "stays")}
    assert (code, True) == (wanted[str(steps[-1][1])][0], wanted[str(steps[-1][1])][1] in text)
    assert (here / LIST).read_text() == "old\n"
    assert {path.name for path in here.iterdir()} == {"my train.py", LIST}


def test_wizard_bootstraps_machines_without_torch(
    loopback_cluster: Callable[..., Cluster], here: Path
) -> None:
    """Asked, it is left; unasked, the wheels come from where pip is told to look."""
    cluster = loopback_cluster(1)
    bare = here.parent / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    reach = ["--ssh-config", str(cluster.ssh_config), "--nodes", "a.txt"]
    host = f"{cluster.addresses[0]} python={bare}/bin/python"
    code, text = dialogue(here, [host, *reach], ("Make it now?", "n\n"))
    assert code == 3 and "torch: " in text and "when that is mended type: master_launch" in text
    assert f"python={bare}/bin/python # no GPU" in (here / "a.txt").read_text()
    for name in ("torch", "numpy"):
        wheel(here.parent, name, "1.0")
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(here.parent)}
    env = {**pip, "XDG_CACHE_HOME": str(here.parent / "cache")}
    code, out, err = typed(["init", host, "--yes", *reach[:-1], "b.txt"], here, **env)
    assert "made in" in out, err
    assert (here / "b.txt").exists()


def test_with_torch_names_another_python_that_has_it() -> None:
    node, venv = Node("a"), ("~/venv/bin/python", "/a path/python")
    made = ("~/.orchestrator/environments/newest/bin/python",)
    assert node_with_torch(facts(torch="", torch_elsewhere=venv), node).python == venv[0]
    assert node_with_torch(facts(torch="", torch_elsewhere=made), node).activate == "bootstrap"
    assert node_with_torch(facts(torch_elsewhere=venv), node) == node
    wrapped = replace(node, wrap="docker exec -i a")
    assert node_with_torch(facts(torch="", torch_elsewhere=venv), wrapped) == wrapped
