"""The line for a node's login shell: every word arrives as it is, and nothing stays behind."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.head.commands.machines.exec import Stream
from orchestrator.head.connect.subprocess_transport import LocalTransport, ProcessConnection
from orchestrator.head.exec.execution import BEGINS, GO, Directory, Execution, shell_line
from orchestrator.head.nodes import server_command
from orchestrator.head.nodes.node_list import Node, NumberedNode
from tests.node.running import wait_until

SHELLS = ("sh", "bash", "zsh", "csh", "tcsh", "fish")
ODD = [
    *("a b", "it's", '"', "!x !!", "\\n \\0 \\\\", "new\nline", "$HOME `id` $(id)", "é漢ā"),
    *("*?[a]{b,c}", "%s %b", "~", "-n", "", os.fsdecode(b"\xff\x81\x88"), "#", "\t", "^&;|<>()"),
]
FIRST = server_command.FIRST_LINE + f"{GO}\n".encode()
PRINT = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"


def started(line: str, shell: str = "sh", **env: str) -> subprocess.Popen[bytes]:
    """The line in a login shell and a session of its own, as sshd starts it."""
    return subprocess.Popen(
        [shell, "-c", line],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **env},
        start_new_session=True,
    )


def run(line: str, shell: str = "sh", **env: str) -> tuple[int, bytes, bytes]:
    process = started(line, shell, **env)
    assert process.stdin and process.stdout and process.stderr
    process.stdin.write(FIRST)
    process.stdin.flush()
    # Its input is open until then.
    code = process.wait(timeout=60)
    said = [stream.read().partition(BEGINS)[2] for stream in (process.stdout, process.stderr)]
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()
    return code, said[0], said[1]


@pytest.mark.parametrize("shell", [name for name in SHELLS if shutil.which(name)])
def test_shell_line_passes_words_through_every_login_shell(shell: str) -> None:
    code, out, _ = run(shell_line([sys.executable, "-c", PRINT, *ODD], Directory("/")), shell)
    assert code == 0
    assert out.split(b"\0") == [os.fsencode(word) for word in ODD]


def test_shell_line_takes_one_word_as_shell_text() -> None:
    text = shell_line(["echo a | tr a b; exit 3"], Directory("/"))
    assert run(text, SHELL="/bin/sh") == (3, b"b\n", b"")
    assert run(shell_line(["echo", "a | tr a b"], Directory("/"))) == (0, b"a | tr a b\n", b"")


def test_shell_line_enters_directory(tmp_path: Path) -> None:
    inside = tmp_path / "it's here"
    inside.mkdir()

    def where(directory: Directory) -> tuple[int, bytes, bytes]:
        return run(shell_line(["pwd", "-P"], directory), HOME=str(tmp_path))

    assert where(Directory(str(inside)))[1] == f"{inside.resolve()}\n".encode()
    assert where(Directory("~/it's here"))[1] == f"{inside.resolve()}\n".encode()
    assert where(Directory("~"))[1] == f"{tmp_path.resolve()}\n".encode()
    assert where(Directory("/no such"))[::2] == (0, b"")
    assert b"no directory /no such" in where(Directory("/no such", named=True))[2]
    assert where(Directory("/no such", needed=True))[:2] == (125, b"")


@pytest.mark.parametrize("said", [b"", b"exit\n", b"go\n", b"another\ngo\n"])
def test_shell_line_runs_nothing_before_go_ahead(said: bytes) -> None:
    process = started(shell_line(["true"], Directory("/")))
    process.communicate(said, timeout=60)
    assert process.returncode == 125


def test_shell_line_gives_empty_input() -> None:
    assert run(shell_line(["cat", "-"], Directory("/"))) == (0, b"", b"")


def test_shell_line_refuses_too_long_command() -> None:
    with pytest.raises(UsageError, match=r"too long.*\n.*push FILE"):
        shell_line(["echo", "x" * 200_000], Directory("/"))


class RcFile(LocalTransport):
    """This machine, where a login shell runs a text before any command."""

    def __init__(self, directory: Path, shell: str, text: str) -> None:
        self.timeout = 3.0
        self.login = directory / "login"
        self.login.write_text(f'#!/usr/bin/env {shell}\n{text}\neval "$3"\n')
        self.login.chmod(0o755)

    def connect(self, node: object, timeout: float | None = None) -> ProcessConnection:
        return ProcessConnection((str(self.login),), "")


@pytest.mark.parametrize("shell", [name for name in ("bash", "zsh") if shutil.which(name)])
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo noise; echo noise >&2", ""),
        ("exit 0", "its login shell ends before the command, with exit code 0"),
        ("echo no such host >&2; exit 3", "with exit code 3: no such host"),
        ("exec sh", "its login shell ends before the command"),
        ("exec csh -f", "its login shell ends before the command"),
        ("cat", "its login shell never gets to our command"),
        ("echo waiting for a disk; cat >/dev/null", "it says: waiting for a disk"),
        # As when our line comes to run at the end of the wait.
        ("echo no disk; echo input-was-taken >&2; cat >/dev/null", "it says: no disk"),
    ],
)
def test_execution_survives_or_reports_rc_file(
    tmp_path: Path, shell: str, text: str, problem: str
) -> None:
    """Either the command runs, and nothing else is shown, or it never does, and that is said."""
    mark = tmp_path / "ran"
    out, err = Stream(), Stream()
    execution = Execution(
        RcFile(tmp_path, shell, text),
        [NumberedNode(0, Node("n"))],
        lambda _: shell_line(["sh", "-c", f"echo said; touch {mark}"], Directory("/")),
        lambda _, errors: err if errors else out,
    )
    (outcome,) = execution.go()
    assert problem in outcome.problem and outcome.lost == bool(problem)
    assert (outcome.code, mark.exists()) == ((None, False) if problem else (0, True))
    assert (bytes(out.data), bytes(err.data)) == (b"" if problem else b"said\n", b"")


def test_command_given_up_never_runs_later(tmp_path: Path) -> None:
    """A login shell that waits, and does not read, comes to the command when all is over."""
    os.mkfifo(tmp_path / "gate")
    ssh = RcFile(tmp_path, "bash", f"read x <{tmp_path}/gate")
    ssh.timeout = 0.2
    node = NumberedNode(0, Node("n"))
    line = shell_line(["touch", str(tmp_path / "ran")], Directory("/"))
    execution = Execution(ssh, [node], lambda _: line, lambda *_: Stream())
    with ThreadPoolExecutor() as threads:
        outcomes = threads.submit(execution.go)
        wait_until(lambda: execution.sessions[0].given_up, "the limit")
        (tmp_path / "gate").write_text("\n")
        # The outcome of a local process comes after its end.
        (outcome,) = outcomes.result(timeout=60)
    assert outcome.problem == server_command.WAITS
    assert not (tmp_path / "ran").exists()
