"""A node runs only the code that is sent to it; this package is not installed there."""

import fcntl
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from termios import FIONREAD

import pytest

from orchestrator.common.errors import NodeError
from orchestrator.head.connect import beats, channel
from orchestrator.head.connect import reach as reaching
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import ask_node, open_channel, reach_node
from orchestrator.head.connect.ssh_config import Destination
from orchestrator.head.connect.subprocess_transport import LocalTransport, ProcessConnection
from orchestrator.head.nodes import library, server_command
from orchestrator.head.nodes.environment import Environment
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.nodes.server_command import (
    FIRST_LINE,
    READ_PROGRAM,
    quote_word,
    sized_program,
)
from orchestrator.protocol.requests.follow import AskJobState
from orchestrator.protocol.requests.machine import Probe
from orchestrator.protocol.requests.request import Answered, Ping
from orchestrator.protocol.spec import Target

# The tests' own Python has the path of our sources, which a node does not have.
ALONE = """
import os, sys
sys.path[:] = [path for path in sys.path if not os.path.isdir(os.path.join(path, 'orchestrator'))]
"""
SCRIPT = """
import orchestrator, orchestrator.distributed
from orchestrator import Trainer
print(orchestrator.__file__, Trainer.__module__)
"""


@pytest.mark.slow
def test_library_is_enough_for_engine_and_user_imports(tmp_path: Path) -> None:
    for name, data in library.own_library().files:
        path = tmp_path / "library" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "script.py").write_text(SCRIPT)
    node = tmp_path / "library/orchestrator/node/job/ranks"
    code = f"{ALONE}sys.path[0] = {str(node)!r}\nimport rank\n"
    code += "rank.run_python('script', 'script.py', [])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        str(tmp_path / "library/orchestrator/__init__.py"),
        "orchestrator.engine.trainer",
    ]


def test_quote_survives_every_login_shell() -> None:
    shells = [
        shell for shell in ("sh", "bash", "zsh", "csh", "tcsh", "fish") if shutil.which(shell)
    ]
    for word in ("!", "a!b c!!", "'!'", "$x", "~/é", "*", "`a`", READ_PROGRAM, ""):
        for shell in shells:
            command = f"exec /usr/bin/printf '<%s>' {quote_word(word)}"
            run = subprocess.run([shell, "-c", command], stdout=subprocess.PIPE, check=False)
            assert run.stdout.decode() == f"<{word}>", shell


def test_read_program_accepts_pieces_and_leaves_rest() -> None:
    program = f"print({'é' * 99_000!r} == 99_000 * 'é', f.read(4))"
    data = FIRST_LINE + sized_program(program) + b"next"
    words = [sys.executable, "-Xutf8", "-c", READ_PROGRAM]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reading:
        assert reading.stdin is not None and reading.stdout is not None
        for begin in range(0, len(data), 70_000):
            reading.stdin.write(data[begin : begin + 70_000])
            reading.stdin.flush()
            while any(fcntl.ioctl(reading.stdin, FIONREAD, bytes(4))):
                assert reading.poll() is None
                time.sleep(0.001)
        assert reading.stdout.read() == b"True b'next'\n"


@pytest.mark.parametrize(
    ("pythons", "words"),
    [
        (["/no/such/python"], "there is no /no/such/python that can be executed"),
        (["/no", "nor-this"], "there is no Python: neither /no nor nor-this"),
        (["old"], "its Python 2.7.18 is too old: 3.9 is needed"),
        (["two"], "its Python TWO is too old: 3.9 is needed"),
        (["broken"], "its Python, BROKEN, ends before our program starts: Error: no encodings"),
    ],
)
def test_begin_explains_missing_or_broken_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pythons: list[str], words: str
) -> None:
    # This stand-in handles our program as Python 2 does, which is no longer installed anywhere.
    old = tmp_path / "old"
    first = (
        READ_PROGRAM.split(";")[1].replace("version_info", "old").replace("sys.version)", "old)")
    )
    old.write_text(
        f"#!/bin/sh\nexec '{sys.executable}'"
        f" -c 'import sys; sys.old = (2, 7); old = \"2.7.18 (default)\"; {first}'\n"
    )
    # A PYTHONHOME that does not exist has this effect.
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho Error: no encodings >&2; echo '<no frame>' >&2; exit 1\n")
    for program in (old, broken):
        program.chmod(0o755)
    two = tmp_path / "two"
    two.write_text("#!/bin/sh\necho 'Unknown option: -X' >&2; echo usage: ... >&2; exit 2\n")
    two.chmod(0o755)
    known = {"old": str(old), "broken": str(broken), "two": str(two)}
    paths = [known.get(python, python) for python in pythons]
    monkeypatch.setattr(server_command, "python_candidates", lambda _: paths)
    with pytest.raises(NodeError) as refused:
        NodeChannel(ProcessConnection((), ""), Environment(), 10).begin(10)
    assert refused.value.what == words.replace("BROKEN", str(broken)).replace("TWO", str(two))


def test_open_channel_closes_connection_if_server_fails() -> None:
    """A head that looks for a node for days would leave it another login each time."""
    connection = Login((), "")
    with pytest.raises(NodeError, match="there is no /no/such/python"):
        open_channel(connection, Node("here", python="/no/such/python"), 10)
    assert connection.closed


def test_reach_closes_connection_if_probe_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    logins: list[Login] = []

    class Transport(LocalTransport):
        def connect(self, destination: Destination, timeout: float | None = None) -> Login:
            logins.append(Login((), ""))
            return logins[-1]

    def cut_off(connection: Login, node: Node, timeout: float) -> NodeChannel:
        channel = open_channel(connection, node, timeout)
        channel.close()
        return channel

    monkeypatch.setattr(reaching, "open_channel", cut_off)
    target = Target(kind="program", name="sh")
    probe = Probe(cwd="/", workdir=None, peers=(), target=target)
    with pytest.raises(NodeError):
        reach_node(Transport(), Node("here", python=sys.executable), probe)
    assert [login.closed for login in logins] == [True]


def test_ask_once_works_without_nodes_environment(tmp_path: Path) -> None:
    """It was renamed, or its disk is away: the job that runs in it must be ended all the same."""
    node = Node("here", activate=f"script:{tmp_path}/gone", wrap="env INSIDE=1")
    question = AskJobState(job="job", part=0, attempt=1)
    assert ask_node(LocalTransport(), node, question, 30).state == "unknown there"
    probe = Probe(cwd="/", workdir=None, peers=(), target=Target(kind="program", name="sh"))
    # The node starts no process without it.
    with pytest.raises(NodeError, match="there is no file"):
        reach_node(LocalTransport(), node, probe)
    # The first reason is reported.
    with pytest.raises(NodeError, match="there is no file"):
        missing = replace(node, python="/no/such/python")
        ask_node(LocalTransport(), missing, AskJobState(job="job", part=0, attempt=1), 30)


def test_beats_reach_node_while_head_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that downloads for minutes, or serves a slow node, would be left by the others."""
    monkeypatch.setattr(beats, "HEAD_BEAT_SECONDS", 0.01)
    monkeypatch.setattr(channel, "beats", own := beats.Beats())
    busy = open_channel(ProcessConnection((), ""), Node("here", python=sys.executable), 10)
    while not isinstance(said := busy.message(time.monotonic() + 30, "no answer"), Answered):
        pass
    assert said.id == 1
    assert busy.ask(Ping(), 30).time > 0 and 2 not in busy.pending, "answers are skipped"
    sent = busy.count
    busy.beat_if_quiet()
    assert busy.count == sent, "it has just heard something"
    busy.beat()
    assert busy.count == sent + 1, "a caller that wants an answer at once gets it"
    busy.close()
    assert not list(own.channels), "one that is closed is not heard from again"


class Login(ProcessConnection):
    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()


class Pieces:
    """A connection whose channel says these, each in a read of its own."""

    address = ""

    def __init__(self, *says: bytes) -> None:
        self.says = list(says)

    def run(self, command: str, timeout: float) -> "Pieces":
        nonce = re.findall(r"orchestrator-[0-9a-f]{16}", command)[0].encode()
        self.says = [piece.replace(b"NONCE", nonce) for piece in self.says]
        return self

    def settimeout(self, timeout: float | None) -> None:
        pass

    def sendall(self, data: bytes) -> None:
        pass

    def recv(self, size: int) -> bytes:
        return self.says.pop(0) if self.says else b""

    def recv_stderr_ready(self) -> bool:
        return False


def test_begin_joins_refusal_sent_in_pieces() -> None:
    connection = Pieces(b"noise\nNONCE\n", b"?", b"it is not ", b"there\n")
    environment = Environment(activate="script:/a")
    with pytest.raises(NodeError) as refused:
        NodeChannel(connection, environment, 10).begin(10)  # type: ignore[arg-type]
    assert refused.value.what == "script:/a: it is not there"


def test_library_is_read_once_for_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With packing it takes 0.1 s: 64 nodes that are reached at once had cost the head 5 s."""
    read = []
    together, another = threading.Barrier(8), threading.Event()

    def sources() -> list[Path]:
        if read:
            another.set()
        read.append(1)
        another.wait(0.5)
        return []

    def connect(_: int) -> library.Library:
        together.wait()
        return library.own_library()

    library.read_library.cache_clear()
    monkeypatch.setattr(library, "source_files", sources)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(connect, range(8)))) == 1
    finally:
        library.read_library.cache_clear()
    assert read == [1]
