"""Interrupts before a job runs: answered at once, or held until it can be ended."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

HELD = """
import os, signal
from orchestrator.common import interrupt
interrupt.install_handlers()
interrupt.hold_interrupts()
os.kill(os.getpid(), signal.{name})
print(interrupt.end_is_wanted(), *interrupt.release_interrupts(), flush=True)
"""
AFTERWARDS = """
interrupt.undo_on_interrupt(lambda: print("undone", flush=True))
os.kill(os.getpid(), signal.{name})
print("goes on", flush=True)
"""


def said(program: str, name: str, before: str = "") -> tuple[str, str, int]:
    words = [sys.executable, "-c", before + program.format(name=name)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout, done.stderr, done.returncode


@pytest.mark.parametrize(("name", "ends"), [("SIGINT", True), ("SIGTERM", True), ("SIGHUP", False)])
def test_held_signal_is_answered_later(name: str, ends: bool) -> None:
    number = int(getattr(signal, name))
    assert said(HELD, name) == (f"{ends} {number}\n", "", 0)
    later = said(HELD + AFTERWARDS, name)
    assert later == (f"{ends} {number}\nundone\n", "\ninterrupted\n", 130)


def test_nohup_is_respected() -> None:
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    assert said(HELD + AFTERWARDS, "SIGHUP", ignore) == ("False\ngoes on\n", "", 0)


def test_closed_terminal_does_not_hinder_exit() -> None:
    closed = HELD + "os.close(2)\n" + AFTERWARDS
    assert said(closed, "SIGINT") == ("True 2\nundone\n", "", 130)


LEAVES = """
import os, signal
from pathlib import Path
from orchestrator.common import interrupt
from orchestrator.head.start.nodes import marker_file
interrupt.install_handlers()
with marker_file(Path("directory")):
    assert os.listdir("directory")
    os.kill(os.getpid(), signal.{name})
"""
STAYS = """
with marker_file(Path("directory")):
    pass
print(os.listdir("directory"))
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_immediate_exit_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "directory").mkdir()
    assert said(LEAVES, name)[1:] == ("\ninterrupted\n", 130)
    assert not list((tmp_path / "directory").iterdir())
    imports = LEAVES.partition("interrupt.install")[0]
    assert said(imports + STAYS, name) == ("[]\n", "", 0)
