"""The kind of program that a name stands for."""

import shlex
import sys
from pathlib import Path

import pytest

from orchestrator.common import program
from orchestrator.common.program import how_to_add, path_with, program_at


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("#!{python}\nimport tool\n", "script"),
        ("#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\nimport tool\n", "script"),
        ("#!/opt/other/bin/python\nimport tool\n", "program"),
        ("#!/usr/bin/env python3\nimport tool\n", "program"),
        ('#!/bin/sh\nexec other "$@"\n', "program"),
        ("\x7fELF", "program"),
    ],
)
def test_console_script_of_this_python_is_a_script(
    text: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "bin/tool"
    command.parent.mkdir()
    command.write_text(text.format(python=sys.executable))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent))
    named = str(command) if kind == "script" else "tool"
    assert program_at("tool", str(tmp_path)) == (kind, named)


def test_command_beside_python_precedes_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("venv", "usr"):
        (tmp_path / place).mkdir()
        for name in ("python3", "tool"):
            (tmp_path / place / name).write_text(f"#!{tmp_path}/{place}/python3\n")
            (tmp_path / place / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv/python3"))
    monkeypatch.setenv("PATH", str(tmp_path / "usr"))
    assert program_at("tool", "/") == ("script", str(tmp_path / "venv/tool"))


@pytest.mark.parametrize(
    ("directories", "path", "wanted"),
    [
        (("venv", "usr"), "{usr}", "{venv}:{usr}"),
        (("venv", "usr"), "{usr}:{venv}", "{venv}:{usr}:{venv}"),
        (("venv", "usr"), "{venv}:{usr}", "{venv}:{usr}"),
        # No other directory precedes it.
        (("venv",), "{usr}:{venv}", "{usr}:{venv}"),
        # This Python has another name and is alone in its directory.
        ((), "{usr}", "{usr}"),
    ],
)
def test_path_with_puts_jobs_python_first(
    tmp_path: Path, directories: tuple[str, ...], path: str, wanted: str
) -> None:
    names = {name: str(tmp_path / name) for name in ("venv", "usr")}
    for directory in directories:
        (tmp_path / directory).mkdir()
        for name in ("python", "python3"):
            (tmp_path / directory / name).touch(0o755)
    python = str(tmp_path / "venv" / "python3.11")
    assert path_with(python, path.format(**names)) == wanted.format(**names)


@pytest.mark.parametrize(
    ("prefix", "receipt", "command"),
    [
        ("archive-v0/x", "", "uvx --with torch --from /w/a.whl orchestrator demo --size 1"),
        ("tools/x", "uv-receipt.toml", "uv tool install --with torch /w/a.whl"),
        ("venvs/x", "pipx_metadata.json", "pipx inject master-launch torch"),
        ("venv", "", shlex.join([sys.executable, "-m", "pip", "install", "torch"])),
    ],
)
def test_how_to_add_fits_way_of_installation(
    prefix: str, receipt: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place := tmp_path / prefix).mkdir(parents=True)
    (place / (receipt or "none")).touch()
    monkeypatch.setattr(sys, "prefix", str(place))
    monkeypatch.setattr(sys, "argv", ["/x/bin/orchestrator", "demo", "--size", "1"])
    monkeypatch.setattr(program, "installed_from", lambda: "/w/a.whl")
    assert how_to_add("torch") == command
