"""Where the variables of the ranks come from, and what wins."""

import contextlib
import os
import pty
import sys
from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.start import variables

HERE = {"HERE": "from here", "WANDB_MODE": "offline", "WANDB_API_KEY": "k", "HOME": "/root"}


def parsed(text: str) -> dict[str, str]:
    return variables.parse_variables(text, "f.env", HERE)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("A=b", "b"),
        ("A=", ""),
        ("  export A = b c  ", "b c"),
        ("A=b#c", "b#c"),
        ("A=b # a comment", "b"),
        ("A=a=b", "a=b"),
        ("A=it's", "it's"),
        ("A=$5 \\n", "$5 \\n"),
        ("A=' # x$Y\\n'", " # x$Y\\n"),
        ("A='${B}'", "${B}"),
        ('A="a\\tb\\n\\"c\\" \\$ \\x" # a comment', 'a\tb\n"c" $ \\x'),
        ('A="\\${B}"', "${B}"),
        ("# A=no\n\n\t\nA=b\nB=2", "b"),
        ("A=1\nA=2", "2"),
        ("HERE\nA=b", "b"),
        ("A=\u00e4", "\u00e4"),
    ],
)
def test_parsed_reads_line(text: str, value: str) -> None:
    assert parsed(text)["A"] == value


def test_parsed_takes_bare_name_from_environment() -> None:
    assert parsed("HERE\nexport WANDB_MODE\n") == {n: HERE[n] for n in ("HERE", "WANDB_MODE")}


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("A=b\nnot a variable", 2, "a line is NAME=VALUE"),
        ("1A=b", 1, "a line is NAME=VALUE"),
        ("=b", 1, "a line is NAME=VALUE"),
        ("A-B=c", 1, "a line is NAME=VALUE"),
        ("ELSEWHERE", 1, "ELSEWHERE has no value"),
        ('A="one"\n\nB="three', 3, "a line is NAME=VALUE"),
        ("A='b' c", 1, "a line is NAME=VALUE"),
        ("A=${HOME}/x", 1, "is not replaced here"),
        ('A="${HOME}"', 1, "is not replaced here"),
        ("A=b\nB=a\0b", 2, "a line is"),
    ],
)
def test_parsed_names_invalid_line_without_showing_it(text: str, line: int, what: str) -> None:
    with pytest.raises(UsageError, match=f"f.env, line {line}: ") as raised:
        parsed(text)
    assert what in raised.value.what
    assert "three" not in raised.value.what


def test_read_file_refuses_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"A=b\nC=\xe4\n")
    for name, what in (
        ("latin", "latin cannot be read: it is not UTF-8"),
        ("none", "No such file"),
    ):
        with pytest.raises(UsageError, match=what):
            variables.read_file(str(tmp_path / name), {})
    with pytest.raises(UsageError, match="cannot be read"):
        variables.read_file(str(tmp_path), {})
    (tmp_path / "windows").write_bytes(b'\xef\xbb\xbfA=b\r\nC="d"\r\n')
    assert variables.read_file(str(tmp_path / "windows"), {}) == {"A": "b", "C": "d"}


def test_given_lets_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "f.env"
    file.write_text("A=file\nB=file\nWANDB_MODE=file\nWANDB_API_KEY=file\n")
    arguments = LaunchArguments(
        env_file=(str(file),), env=("A=typed", "WANDB_MODE"), secret=("HERE",)
    )
    settings = variables.user_variables(arguments, HERE)
    assert {s.name: s.value for s in settings} == {
        "A": "typed",
        "B": "file",
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": "file",
        "HERE": "from here",
    }
    assert [s.name for s in settings if s.secret] == ["HERE"]


def test_secret_value_on_command_line_is_refused() -> None:
    with pytest.raises(UsageError, match="can read command lines") as raised:
        variables.secret_value("TOKEN=hunter2", {})
    assert "hunter2" not in str(raised.value)


def test_secret_value_is_asked_without_echo() -> None:
    code = (
        "from orchestrator.head.start.variables import secret_value\n"
        "import sys; sys.exit(secret_value('TOKEN', {}) != 'hunter2')"
    )
    child, terminal = pty.fork()
    if not child:
        os.execv(sys.executable, [sys.executable, "-c", code])
    shown = b""
    while b"(not shown): " not in shown:
        shown += os.read(terminal, 1000)
    os.write(terminal, b"hunter2\n")
    _, status = os.waitpid(child, 0)
    assert status == 0
    # A closed terminal raises an error and no end of file.
    with contextlib.suppress(OSError):
        while more := os.read(terminal, 1000):
            shown += more
    os.close(terminal)
    assert b"hunter2" not in shown


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("DATABASE=postgres-login-1234", True),
        ("WANDB_API_KEY=0123456789abcdef", True),
        ("MODEL=/data/llama-3-8b", False),
        ("PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128", False),
        ("WANDB_MODE=offline", False),
        ("STEPS=100000000", False),
    ],
)
def test_env_file_marks_secrets_by_name(tmp_path: Path, line: str, secret: bool) -> None:
    file = tmp_path / "f.env"
    file.write_text(line + "\n")
    (setting,) = variables.user_variables(LaunchArguments(env_file=(str(file),)), {})
    assert setting.secret is secret
