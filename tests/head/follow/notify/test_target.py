"""Whom --notify names, what of that is shown, and the file that keeps it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.follow.notify import target
from orchestrator.head.follow.notify.target import Target, parse
from orchestrator.head.start import record as recording
from orchestrator.head.start.request import resolve
from orchestrator.records.experiment import Experiment

URL = "https://hooks.example.org/services/T0/B0/hidden-part?token=1"


@pytest.mark.parametrize(
    ("written", "kind", "to", "shown", "secret"),
    [
        (f"webhook:{URL}", "webhook", URL, "webhook:https://hooks.example.org/(redacted)", URL),
        *(
            (
                f"webhook:http://10.0.0.1:{port}/x",
                "webhook",
                f"http://10.0.0.1:{port}/x",
                f"webhook:http://10.0.0.1:{port}/(redacted)",
                f"http://10.0.0.1:{port}/x",
            )
            for port in (8065, 8080)
        ),
        ("webhook:env:HOOK", "webhook", URL, "webhook:env:HOOK", URL),
        ("mail:ops+ml@example.org", "mail", "ops+ml@example.org", "mail:ops+ml@example.org", ""),
        ("mail:root", "mail", "root", "mail:root", ""),
        ("cmd:./tell.sh", "cmd", "./tell.sh", "cmd:./tell.sh", ""),
        ("cmd: curl -d@- x", "cmd", "curl -d@- x", "cmd:curl (redacted)", "curl -d@- x"),
        ("cmd:KEY=1 curl", "cmd", "KEY=1 curl", "cmd:(redacted)", "KEY=1 curl"),
    ],
)
def test_what_is_understood_and_shown(
    written: str, kind: str, to: str, shown: str, secret: str
) -> None:
    understood = parse(written, {"HOOK": f" {URL}\n"})
    assert (understood.kind, understood.to) == (kind, to)
    assert (understood.shown, understood.secret) == (shown, secret)


def test_a_url_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hook").write_text(URL + "\n")
    monkeypatch.chdir(tmp_path)
    understood = parse("webhook:file:hook")
    assert understood.to == URL
    assert understood.shown == f"webhook:file:{tmp_path / 'hook'}"  # found from elsewhere, too


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("https://hooks.example.org/x", "nobody is told that way"),
        ("slack:x", "nobody is told that way"),
        ("plain", "nobody is told that way"),
        ("cmd:", "says nobody"),
        ("cmd:a\0b", "says nobody"),
        ("mail:-OQueueDirectory=/tmp", "not an address"),
        ("mail:a@b c", "not an address"),
        ("mail:a,b@c", "not an address"),
        ("webhook:env:NOT_SET", "NOT_SET is not set here"),
        ("webhook:env:a b", "is not set here"),
        ("webhook:file:/nowhere/hook", "cannot be read"),
        ("webhook:ftp://host/hidden", "http:// or https://"),
        ("webhook:https://user:hidden@host/", "has a login"),
        ("webhook:http://[::1/hidden", "not a URL"),
        ("webhook:http://host/hidden part", "characters"),
    ],
)
def test_what_is_refused(written: str, problem: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse(written, {})
    assert problem in refusal.value.what and refusal.value.fix
    assert "hidden" not in str(refusal.value)


def test_no_record_of_a_launch_shows_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", URL.replace("T0", "T1"))
    monkeypatch.chdir(tmp_path)
    command = ["master_launch", "--notify", f"webhook:{URL}", f"--notify=cmd:a '{URL}' \"b\"", "x"]
    words = [f"webhook:{URL}", f"cmd:a '{URL}' \"b\"", "webhook:env:HOOK"]
    arguments = LaunchArguments(program=("x",), launch={"notify": tuple(words)})
    request = resolve(arguments, command)
    assert [each.to for each in request.told] == [URL, f"a '{URL}' \"b\"", URL.replace("T0", "T1")]
    shown = json.dumps([request.config.launch.notify, *recording.shown_command(request)])
    assert "hidden-part" not in shown and "webhook:env:HOOK" in shown
    assert "hidden-part" in json.dumps(request.secrets)  # hidden wherever else they would stand


def test_it_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path)
    assert target.kept(experiment) == ()
    told = (parse(f"webhook:{URL}"), parse("cmd:a b"))
    target.keep(experiment, told)
    file = tmp_path / ".notify"
    assert file.stat().st_mode & 0o777 == 0o600
    assert target.kept(experiment) == told
    file.chmod(0o620)
    with pytest.raises(UsageError, match="not believed"):
        target.kept(experiment)


@pytest.mark.parametrize("text", ["{", "[[1]]", "[" * 100_000, "3", "\xff"])
def test_a_damaged_file_says_so(tmp_path: Path, text: str) -> None:
    (tmp_path / ".notify").write_bytes(text.encode("latin-1"))
    (tmp_path / ".notify").chmod(0o600)
    with pytest.raises(UsageError, match="damaged"):
        target.kept(Experiment(tmp_path))


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text('[["cmd", "cmd:x", "x"]]')
    (tmp_path / ".notify").symlink_to("other")
    with pytest.raises(UsageError, match="cannot be read"):
        target.kept(Experiment(tmp_path))


def test_nothing_is_written_where_nobody_is_told(tmp_path: Path) -> None:
    target.keep(Experiment(tmp_path), ())
    assert not list(tmp_path.iterdir())
    assert Target("cmd", "cmd:a", "a").variable == ""
