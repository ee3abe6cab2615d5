"""What kind of program a name is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.common.program import program_at


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
def test_a_command_that_pip_installed_for_this_python_is_python(
    text: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "bin/tool"
    command.parent.mkdir()
    command.write_text(text.format(python=sys.executable))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent))
    named = str(command) if kind == "script" else "tool"
    assert program_at("tool", str(tmp_path)) == (kind, named)
