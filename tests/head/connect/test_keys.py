"""A key that cannot be used is named with what makes it usable, and nobody is sent to copy it."""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import paramiko
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


def keygen(*words: str) -> None:
    subprocess.run(["ssh-keygen", "-q", *words], check=True)


def add(agent: Path, key: Path) -> None:
    environment = {**os.environ, "SSH_AUTH_SOCK": str(agent)}
    subprocess.run(["ssh-add", "-q", str(key)], env=environment, check=True, capture_output=True)


@pytest.mark.parametrize("agent", ["", "/some/agent"])
def test_a_key_with_a_passphrase_is_unlocked_by_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", agent)
    path = tmp_path / "my key"
    keygen("-t", "ed25519", "-N", "secret", "-f", str(path))
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
            keygen("-t", "ed25519", "-N", "", "-C", name, "-f", str(key))
            add(path, key)
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


# -- kinds of keys ------------------------------------------------------------------------------


def named(text: bytes) -> bytes:
    return len(text).to_bytes(4, "big") + text


def write_security_key(path: Path) -> None:
    """Write what ssh-keygen leaves of a key that is in hardware: `-t ed25519-sk`."""
    kind, public, application = b"sk-ssh-ed25519@openssh.com", os.urandom(32), b"ssh:"
    half = named(kind) + named(public) + named(application)
    private = bytes(8) + half + b"\x01" + named(b"handle") + named(b"") + named(b"me")
    private += bytes(range(1, 1 + -len(private) % 8))
    head = b"openssh-key-v1\0" + named(b"none") * 2 + named(b"") + (1).to_bytes(4, "big")
    text = base64.encodebytes(head + named(half) + named(private)).decode()
    begin, end = (f"-----{word} OPENSSH PRIVATE KEY-----\n" for word in ("BEGIN", "END"))
    path.write_text(begin + text + end)
    path.chmod(0o600)
    path.with_suffix(".pub").write_text(f"{kind.decode()} {base64.b64encode(half).decode()} me\n")


def test_a_security_key_is_for_the_agent(agent: Path, tmp_path: Path) -> None:
    """ssh lists such a key among the usual ones: another, which is good, counts as ever."""
    write_security_key(tmp_path / "id_sk")
    keygen("-t", "ed25519", "-N", "", "-f", str(tmp_path / "good"))
    keys = (tmp_path / "id_sk", tmp_path / "good")
    notes: list[Unusable] = []
    assert labels(notes, keys=keys) == [str(tmp_path / "good")]
    assert notes[0].why.endswith("is a security key, which an agent has to ask")
    assert notes[0].remedy.endswith(f"ssh-add {tmp_path / 'id_sk'}")
    add(agent, tmp_path / "id_sk")
    notes.clear()
    found = labels(notes, keys=(tmp_path / "good",), agent=str(agent))
    assert found[1:] == [f"agent: {name}" for name in ("one", "two", "three", "me")], "the last"
    assert labels(notes, keys=keys, agent=str(agent))[1] == "agent: me", "it is named"
    assert not notes


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_a_key_of_openssl(tmp_path: Path, kind: str) -> None:
    """ssh reads PKCS#8, too, which openssl and many clouds write."""
    path = tmp_path / "key"
    keygen("-t", kind, "-m", "PKCS8", "-N", "", "-f", str(path))
    assert path.read_text().startswith("-----BEGIN PRIVATE KEY-----")
    key = load_key(path, ())
    assert isinstance(key, paramiko.PKey)
    assert key.get_base64() == path.with_suffix(".pub").read_text().split()[1]


def test_what_lies_beside_a_key_does_not_spoil_it(tmp_path: Path) -> None:
    """A command that should have signed it has failed, and left an empty file."""
    keygen("-t", "ed25519", "-N", "", "-f", str(tmp_path / "id"))
    (tmp_path / "id-cert.pub").touch()
    assert labels([], keys=(tmp_path / "id",)) == [str(tmp_path / "id")]


def test_certificates(agent: Path, tmp_path: Path) -> None:
    """A file may have the certificate of a key that only the agent has."""
    keygen("-t", "ed25519", "-N", "", "-f", str(tmp_path / "authority"))
    sign = ("-s", str(tmp_path / "authority"), "-I", "x", "-n", "bob")
    keygen(*sign, "-V", "+1h", str(tmp_path / "two.pub"))
    path = tmp_path / "two-cert.pub"
    both = [f"agent: two with {path}", "agent: two"]
    assert labels([], keys=(tmp_path / "two",), agent=str(agent))[:2] == both
    found = labels([], keys=(), certificates=(path,), agent=str(agent))
    assert found == ["agent: one", *both, "agent: three"]

    keygen("-t", "ed25519", "-N", "", "-f", str(tmp_path / "id"))
    keygen(*sign, "-V", "20200101:20200102", str(tmp_path / "id.pub"))
    (label,) = labels([], keys=(tmp_path / "id",))
    assert label == f"{tmp_path / 'id'}, whose certificate is not valid now"
