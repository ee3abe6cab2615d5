"""The rules of a machine for those who share it, as its policy file has them, or has not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.node.machine.gpus import policy
from orchestrator.protocol.facts import Policy


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o755)
    monkeypatch.setenv("ORCHESTRATOR_POLICY", str(tmp_path / "policy.yaml"))
    return tmp_path / "policy.yaml"


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("", {}),
        ("---\n# nothing yet\n", {}),
        ("gpus_per_user: 8\ntime_limit: 24h # a day\nidle_limit: '30m'\n",
         {"gpus_per_user": 8, "time_limit": 86400.0, "idle_limit": 1800.0}),
        ("gpus_per_user: many\ntime_limit: 2h\n",
         {"time_limit": 7200.0, "problem": "line 1: gpus_per_user cannot be many"}),
        ("gpus_per_user: 0\n", {"problem": "line 1: gpus_per_user cannot be 0"}),
        ("time_limit: 0s\n", {"problem": "line 1: time_limit cannot be 0s"}),
        ("time_limit: soon\n", {"problem": "line 1: time_limit soon: not a time"}),
        ("\n  gpus_per_usr: 8\n", {"problem": "line 2: no rule: gpus_per_usr: 8; there are"
         " gpus_per_user, time_limit, idle_limit"}),
        ("- [1, {", {"problem": "line 1: no rule: - [1, {; there are gpus_per_user, time_limit,"
         " idle_limit"}),
    ],
)  # fmt: skip
def test_a_file(file: Path, text: str, rules: dict[str, object]) -> None:
    """What cannot be understood does not count, and the rest does."""
    file.write_text(text)
    file.chmod(0o644)
    assert policy.read() == Policy(file=str(file), **rules)  # type: ignore[arg-type]


def test_no_file_or_none_that_can_be_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert policy.read().problem == "No such file or directory"  # though somebody has named it
    file.write_bytes(bytes(range(256)))
    file.chmod(0o644)
    assert policy.read().problem.startswith("line 1: no rule: ")
    file.unlink()
    file.mkdir()
    assert policy.read().problem
    monkeypatch.delenv("ORCHESTRATOR_POLICY")
    monkeypatch.setattr(policy, "PLACE", str(file.parent / "not there"))
    assert policy.read() == Policy()


def test_what_others_may_write_does_not_count(file: Path) -> None:
    file.write_text("gpus_per_user: 1")
    for path, mode in ((file, 0o666), (file.parent, 0o1777)):
        file.chmod(0o644)
        path.chmod(mode)
        assert policy.read() == Policy(file=str(file), problem="it may be written by others")


@pytest.mark.skipif(os.getuid() != 0, reason="gives files away")
def test_the_file_of_a_stranger(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a login names may be its directory's owner's; the usual one is root's."""
    file.write_text("gpus_per_user: 1")
    file.chmod(0o644)
    os.chown(file, 1234, 1234)
    assert policy.read().problem == "it belongs to user 1234"
    os.chown(file.parent, 1234, 1234)
    assert policy.read().gpus_per_user == 1
    monkeypatch.setattr(policy, "PLACE", str(file))
    monkeypatch.delenv("ORCHESTRATOR_POLICY")
    assert policy.read().problem == "it belongs to user 1234"
