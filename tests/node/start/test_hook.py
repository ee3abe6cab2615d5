import os
import shutil
import time
from pathlib import Path

import pytest

from orchestrator.node.start import requests as hook
from orchestrator.node.start.requests import HookError, run_hook
from tests.node.running import alive, wait_until


@pytest.fixture(params=["bash", "sh"])
def shell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """bash where there is one; else what every machine has."""
    if request.param == "sh":
        monkeypatch.setattr(hook.shutil, "which", lambda _: None)
    elif shutil.which("bash") is None:
        pytest.skip("no bash here")
    return str(request.param)


pytestmark = pytest.mark.usefixtures("shell")


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("", {}),
        ("# nothing\n", {}),
        # The last line has no line end.
        ("export A=1", {"A": "1"}),
        ("export A=1 B='x y'\n", {"A": "1", "B": "x y"}),
        ("not_exported=1\n", {}),
        ("export GIVEN=$GIVEN,more\n", {"GIVEN": "given,more"}),
        # The value is unchanged.
        ("export GIVEN=given\n", {}),
        ("export A='two\nlines=with equals\n'\n", {"A": "two\nlines=with equals\n"}),
        ("export A='é 漢 $x `y` \"'\n", {"A": 'é 漢 $x `y` "'}),
        ("export A=$(printf '\\377')\n", {"A": "\udcff"}),
        ("export A=\n", {"A": ""}),
        ("echo FAKE=1; printf 'FAKE=2\\0'; echo FAKE=3 >&2; export A=1\n", {"A": "1"}),
        ("cd /; export A=$PWD\n", {"A": "/"}),
        ("[ -e /nowhere ] && export A=1\nexport B=2\n", {"B": "2"}),
        ("f() { export A=$1; }; f 7\n", {"A": "7"}),
        ("cat; export A=1\n", {"A": "1"}),  # what reads standard input finds nothing there
        ("set -eu; export A=1\n", {"A": "1"}),
        ("export A=1; return 0; export B=2\n", {"A": "1"}),
    ],
)
def test_hook_exports_are_returned(text: str, changed: dict[str, str]) -> None:
    assert run_hook(text, {"GIVEN": "given"}, "/") == (changed, [])


def test_hook_unsets_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    # A non-interactive bash drops this variable.
    monkeypatch.setenv("PS1", "(venv) ")
    assert run_hook("unset GIVEN OTHER; export A=1", {"GIVEN": "1"}, "/") == ({"A": "1"}, ["GIVEN"])


def test_hook_runs_in_workdir(tmp_path: Path) -> None:
    assert run_hook("export A=$PWD", {}, str(tmp_path))[0] == {"A": str(tmp_path)}
    assert run_hook("export A=1", {}, str(tmp_path / "missing"))[0] == {"A": "1"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("exit 3", "ended with exit code 3"),
        ("echo why >&2; exit 3", "ended with exit code 3: why"),
        ("echo said; false", "ended with exit code 1: said"),
        ("exit 0", "left by `exit`"),
        ("set -e; false; export A=1", "ended with exit code 1"),
        ("kill -9 $$", "ended with exit code -9"),
        ("if", "ended with exit code "),
    ],
)
def test_failing_hook_is_explained(text: str, words: str) -> None:
    with pytest.raises(HookError) as failed:
        run_hook(text, {}, "/")
    assert str(failed.value).startswith(words)


def test_hook_does_not_wait_for_background_process(tmp_path: Path) -> None:
    """It holds the hook's standard output and error open for as long as it likes."""
    began = time.monotonic()
    text = f"sleep 20 & echo $! > {tmp_path}/pid; export A=1"
    assert run_hook(text, {}, "/")[0] == {"A": "1"}
    assert time.monotonic() - began < 10
    os.kill(int((tmp_path / "pid").read_text()), 9)


def test_hanging_hook_is_ended_with_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "HOOK_SECONDS", 0.3)
    with pytest.raises(HookError, match=r"did not end within 0\.3 s"):
        run_hook(f"sh -c 'echo $$ > {tmp_path}/pid; exec sleep 1000'; true", {}, "/")
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not alive(pid))
