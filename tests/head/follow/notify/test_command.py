"""The commands of --notify: what is refused or shown of them, and the file that keeps them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.follow.notify import command
from orchestrator.head.start import record as recording
from orchestrator.head.start.request import resolve
from orchestrator.records.experiment import Experiment

URL = "https://hooks.example.org/services/T0/B0/hidden-part?token=1"


@pytest.mark.parametrize(
    ("written", "shown", "secrets"),
    [
        ("./tell.sh", "./tell.sh", []),
        (" curl -d@- x", "curl (redacted)", ["curl -d@- x"]),
        ("KEY=1 curl", "(redacted)", ["KEY=1 curl"]),
        ("slack:x", "(redacted)", ["slack:x"]),
    ],
)
def test_records_show_the_program_alone(written: str, shown: str, secrets: list[str]) -> None:
    (checked,) = command.checked([written, written])
    assert command.shown(checked) == shown and command.secrets([checked]) == secrets


@pytest.mark.parametrize(
    ("written", "problem", "fix"),
    [
        (" ", "there is no command", "write a shell command"),
        ("cmd:date", "takes a shell command", "cmd:X is X"),
        ("mail:me@example.org", "takes a shell command", "one with mail"),
        (" https://example.org/hook", "takes a shell command", "one line with curl"),
        ("a\0b", "there is no command", "write a shell command"),
    ],
)
def test_what_is_refused(written: str, problem: str, fix: str) -> None:
    with pytest.raises(UsageError) as refusal:
        command.checked([written])
    assert problem in refusal.value.what and fix in refusal.value.fix
    assert "hidden" not in str(refusal.value)


def test_no_record_of_a_launch_shows_a_secret() -> None:
    words = (f"curl -d @- '{URL}'", "./tell.sh")
    typed = ["master_launch", "--notify", words[0], f"--notify={words[1]}", "x"]
    request = resolve(LaunchArguments(program=("x",), launch={"notify": words}), typed)
    assert request.notify == words
    shown = json.dumps([request.config.launch.notify, *recording.shown_command(request)])
    assert "hidden-part" not in shown and "curl (redacted)" in shown and "./tell.sh" in shown
    assert "hidden-part" in json.dumps(request.secrets)  # hidden wherever else they would stand


def test_it_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path)
    assert command.kept(experiment) == ()
    command.keep(experiment, (f"curl '{URL}'", "a b"))
    file = tmp_path / ".notify"
    assert file.stat().st_mode & 0o777 == 0o600
    assert command.kept(experiment) == (f"curl '{URL}'", "a b")
    file.chmod(0o620)
    with pytest.raises(UsageError, match="written by another login"):
        command.kept(experiment)


@pytest.mark.parametrize("text", ["{", "[[1]]", "[" * 100_000, "3", "\xff"])
def test_a_damaged_file_says_so(tmp_path: Path, text: str) -> None:
    (tmp_path / ".notify").write_bytes(text.encode("latin-1"))
    (tmp_path / ".notify").chmod(0o600)
    with pytest.raises(UsageError, match="damaged"):
        command.kept(Experiment(tmp_path))


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text('["x"]')
    (tmp_path / ".notify").symlink_to("other")
    with pytest.raises(UsageError, match="cannot be read"):
        command.kept(Experiment(tmp_path))


def test_nothing_is_written_without_commands(tmp_path: Path) -> None:
    command.keep(Experiment(tmp_path), ())
    assert not list(tmp_path.iterdir())
