"""A key that cannot be used is named with what makes it usable, and nobody is sent to copy it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.head.connect.ssh import (
    Unusable,
    denied,
    has_other_login,
    has_ticket,
    keys_for,
    load_key,
)
from orchestrator.head.connect.ssh_config import Destination


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


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real ssh-agent with three keys, at a socket that no variable names."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    path = tmp_path / "agent"
    with subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("SSH_AUTH_SOCK=")
        for name in ("one", "two", "three"):
            key = tmp_path / name
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(key)]
            subprocess.run(words, check=True)
            environment = {**os.environ, "SSH_AUTH_SOCK": str(path)}
            subprocess.run(["ssh-add", "-q", str(key)], env=environment, check=True)
            key.unlink()  # its public half stays
        yield path
        running.terminate()


def labels(notes: list[Unusable], **fields: object) -> list[str]:
    there = Destination(host="gpu01", user="bob", port=22, **fields)  # type: ignore[arg-type]
    return [label for label, _ in keys_for(there, notes)]


def test_the_agent_of_the_config_is_asked(agent: Path, tmp_path: Path) -> None:
    notes: list[Unusable] = []
    assert labels(notes, keys=()) == []
    assert labels(notes, keys=(), agent=str(agent)) == ["agent: one", "agent: two", "agent: three"]
    # A key of which the config names the public half comes first, or alone: servers hang up soon.
    public = (tmp_path / "three.pub",)
    for keys in (public, (tmp_path / "three",)):
        found = labels(notes, keys=keys, agent=str(agent))
        assert found == ["agent: three", "agent: one", "agent: two"]
        alone = labels(notes, keys=keys, agent=str(agent), only_these_keys=True)
        assert alone == ["agent: three"]
    assert not notes
    assert labels(notes, keys=(), agent=str(tmp_path / "none")) == []
    assert "of your ssh_config, does not answer (No such file" in notes[0].why


@pytest.mark.parametrize(("code", "has"), [(0, True), (1, False), (None, False)])
def test_ssh_may_get_in_by_a_ticket_of_kerberos_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, has: bool
) -> None:
    if code is not None:
        (tmp_path / "klist").write_text(f'#!/bin/sh\n[ "$1" = -s ] && exit {code}\n')
        (tmp_path / "klist").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    has_ticket.cache_clear()
    there = Destination("gpu01", "bob", 22, (), other_logins=("GSSAPIAuthentication",))
    assert has_other_login(there) is has
    assert not has_other_login(replace(there, other_logins=()))
    assert has_other_login(replace(there, other_logins=("PKCS11Provider",)))
    has_ticket.cache_clear()


def test_what_opens_a_door_for_the_first_key() -> None:
    there = Destination(host="gpu01", user="bob", port=22, keys=())
    copy = "ssh-copy-id -p 22 bob@gpu01"
    for tried, fix in (([], f"once: ssh-keygen -t ed25519; then: {copy}"), (["id_rsa"], copy)):
        assert denied(there, tried, len(tried), []).fix == fix
