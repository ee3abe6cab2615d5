"""The library on a node: whole, ours alone, and not mixed with what else is in the login's home."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.common.errors import NodeError
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.nodes.environment import Environment
from orchestrator.head.nodes.library import own_library, packed_library
from orchestrator.protocol.requests.request import Ping
from orchestrator.protocol.requests.start import Hook
from orchestrator.protocol.timing import HEAD_PATIENCE_SECONDS

pytestmark = pytest.mark.slow

SECONDS = 60.0  # more than it ever takes
# No account has this user and group number.
OTHER = 12345


class Pipes:
    """A node's shell on this machine, spoken to as NodeChannel does through SSH."""

    def __init__(self, home: Path, *before: str) -> None:
        self.home, self.before = home, before
        self.sent = 0

    def run(self, command: str, timeout: float) -> "Pipes":
        line = "; ".join([*self.before, command])
        names = ("PYTHONPATH", "PYTHONSAFEPATH", "ORCHESTRATOR_HOME")
        env = {name: value for name, value in os.environ.items() if name not in names}
        self.shell = subprocess.Popen(
            ["/bin/sh", "-c", line],
            cwd=self.home,
            env={**env, "HOME": str(self.home)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        return self

    def sendall(self, data: bytes) -> None:
        assert self.shell.stdin
        self.sent += len(data)
        if self.shell.stdin.closed:
            raise BrokenPipeError("it was closed")
        self.shell.stdin.write(data)
        self.shell.stdin.flush()

    def recv(self, size: int) -> bytes:
        assert self.shell.stdout
        return os.read(self.shell.stdout.fileno(), size)

    def recv_stderr_ready(self) -> bool:
        return False

    def settimeout(self, timeout: float) -> None:
        pass

    def close(self) -> None:
        assert self.shell.stdin
        assert self.shell.stdout
        self.shell.stdin.close()
        self.shell.wait(SECONDS)
        self.shell.stdout.close()


class Node:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.channels: list[NodeChannel] = []

    def session(self, *before: str) -> NodeChannel:
        """Connect to it as a head does; `before` is what its .bashrc says."""
        channel = NodeChannel(Pipes(self.home, *before), Environment(sys.executable), SECONDS)  # type: ignore[arg-type]
        self.channels.append(channel)
        channel.begin(SECONDS)
        channel.ask(Ping(), HEAD_PATIENCE_SECONDS)
        return channel

    def refusal(self, *before: str) -> str:
        with pytest.raises(NodeError) as refused:
            self.session(*before)
        return str(refused.value)

    @property
    def library(self) -> Path:
        return self.home / ".orchestrator/lib" / own_library().digest


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    (tmp_path / "home").mkdir(mode=0o755)
    node = Node(tmp_path / "home")
    yield node
    for channel in node.channels:
        channel.channel.close()


def modes(path: Path) -> set[int]:
    return {stat.S_IMODE(found.lstat().st_mode) for found in [path, *path.rglob("*")]}


@pytest.mark.parametrize("umask", ["000", "002", "777"])
def test_library_is_private_under_any_umask(node: Node, umask: str) -> None:
    channel = node.session(f"umask {umask}")
    assert modes(node.home / ".orchestrator") == {0o700, 0o600}
    # What a hook writes is the user's own, and so is what the ranks write.
    hooked = channel.ask(Hook(text="export SEEN=$(umask)", env={}, workdir="/"), SECONDS)
    assert hooked.env["SEEN"] == f"0{umask}"


def test_library_is_sent_once(node: Node) -> None:
    """0.4 MB for each command to each of 64 nodes is ten seconds of a slow line from the head."""
    whole = len(packed_library())
    first, second = node.session().channel, node.session().channel
    assert isinstance(first, Pipes)
    assert isinstance(second, Pipes)
    assert first.sent > whole
    assert second.sent < whole / 20
    (node.library / "orchestrator/common/text.py").unlink()
    third = node.session().channel
    assert isinstance(third, Pipes)
    assert third.sent > whole


def test_damaged_library_is_replaced(node: Node) -> None:
    node.session()
    victim = node.library / "orchestrator/node/follow/stop_job.py"
    whole = victim.read_bytes()
    for damage in (b"", whole[:-9], b"\0" * len(whole)):
        victim.write_bytes(damage)
        node.session()
        assert victim.read_bytes() == whole
    victim.unlink()
    victim.symlink_to("/etc/passwd")
    node.session()
    assert victim.read_bytes() == whole
    victim.chmod(0o666)
    node.session()
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600
    assert [path.name for path in node.library.parent.iterdir()] == [node.library.name]


@pytest.mark.parametrize("level", ["", ".orchestrator", ".orchestrator/lib", ".orchestrator/runs"])
def test_directory_writable_by_others_is_refused(node: Node, level: str) -> None:
    path = node.home / level
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o777)
    said = node.refusal()
    assert f"its {path} may be written by everybody" in said
    assert f"chmod go-w {path} there" in said
    path.chmod(0o755)
    node.session()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_library_of_other_user_is_replaced(node: Node) -> None:
    (node.library / "orchestrator").mkdir(parents=True)
    (node.library / "orchestrator/__init__.py").write_text("raise SystemExit('run')")
    os.chown(node.library, OTHER, OTHER)
    node.library.parent.chmod(0o700)
    node.session()
    assert node.library.stat().st_uid == 0


def test_files_in_home_are_not_imported(node: Node) -> None:
    for name in ("json", "zlib", "socket", "signal", "struct", "pwd", "random"):
        (node.home / f"{name}.py").write_text("raise SystemExit('it was run')")
    node.session()
