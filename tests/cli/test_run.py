"""How the commands are started: from a directory that is gone, without standard streams."""

import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from orchestrator.cli.launch import launch_command
from orchestrator.cli.main import cli
from orchestrator.cli.run import GONE_OPTIONS, usage_words

ORCHESTRATOR = shlex.quote(str(Path(sys.executable).with_name("orchestrator")))


def sh(text: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = ["sh", "-c", text]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)


def test_removed_working_directory_is_explained(tmp_path: Path) -> None:
    done = sh(f"mkdir x; cd x; rmdir ../x; {ORCHESTRATOR} status", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    *before, last = done.stderr.splitlines()
    assert last == "error: this directory was removed: go to another"
    # pip starts its commands through sh where the path of a venv has a space, and reports that.
    assert all(line.startswith("sh: ") for line in before)


WRITES = """
import os, signal, click
from orchestrator.common import files, interrupt
from orchestrator.cli.run import run_command

@click.command()
def write():
    with files.open_replacement("report.html") as file:
        os.kill(os.getpid(), signal.SIGINT)

interrupt.install_handlers()
run_command(write, "write")
"""


def test_interrupt_leaves_no_partial_file(tmp_path: Path) -> None:
    (tmp_path / "write.py").write_text(WRITES)
    done = sh(f"{shlex.quote(sys.executable)} write.py", tmp_path)
    assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["write.py"]


def test_full_disk_behind_output_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("127.0.0.1\n127.0.0.2\n")
    done = sh(f"{ORCHESTRATOR} ls > /dev/full", tmp_path)
    assert done.returncode == 2
    assert done.stderr == "standard output cannot be written: No space left on device\n"


def test_invalid_file_name_is_explained(tmp_path: Path) -> None:
    done = sh(f"{ORCHESTRATOR} exec --nodes {'a' * 300} true", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "File name too long" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["prune", "--keep"], "--keep needs a value"),
        (["stop", "--grace", "5x"], "--grace: 5x: there is no unit 'x'"),
        (["demo", "--kil"], "no such option --kil; did you mean --kill?"),
    ],
)
def test_usage_error_shows_problem_and_usage(words: list[str], what: str) -> None:
    with pytest.raises(click.UsageError) as typed:
        cli.main([*words], "orchestrator", standalone_mode=False)
    first, *_, usage, more = usage_words(typed.value).splitlines()
    assert first == f"error: {what}"
    assert usage.startswith(f"  orchestrator {words[0]} [OPTIONS]")
    assert more == f"  more: orchestrator {words[0]} --help"


@pytest.mark.parametrize("name", GONE_OPTIONS)
def test_removed_option_is_answered(name: str) -> None:
    # A launch still has this one.
    command = cli.commands["rerun"] if name == "--env-file" else launch_command
    with pytest.raises(click.NoSuchOption) as refused:
        command.make_context("launch", [name, "x"])
    assert usage_words(refused.value).startswith(f"error: {name} was removed: ")
