"""A key that cannot be used is named with what makes it usable, and nobody is sent to copy it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from orchestrator.head.connect.ssh import Unusable, load_key


@pytest.mark.parametrize("agent", ["", "/some/agent"])
def test_a_key_with_a_passphrase_is_unlocked_by_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", agent)
    path = tmp_path / "my key"
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(path)]
    subprocess.run(words, check=True)
    key = load_key(path, ())
    assert isinstance(key, Unusable)
    assert key.why == f"{path} needs a passphrase"
    start = "" if agent else 'eval "$(ssh-agent -s)"; '
    assert key.remedy == f"{start}ssh-add '{path}'"
    load_key.cache_clear()


def test_a_key_that_others_can_read(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(mode=0o644)
    path.chmod(0o644)
    assert str(load_key(path, ())).endswith(f"and therefore not used: chmod 600 {path}")
