"""A key that cannot be used is named with what makes it usable, and the others are tried."""

import base64
import getpass
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.common.errors import NoKey
from orchestrator.head.connect import fabric_login
from orchestrator.head.connect.fabric_login import (
    SshKeys,
    denied_error,
    label_of,
    load_key,
)
from orchestrator.head.connect.openssh import SshProcess
from orchestrator.head.connect.reach import open_channel
from orchestrator.head.connect.ssh import SshTransport, certificate_of
from orchestrator.head.connect.ssh_config import Destination, SshConfig
from orchestrator.head.connect.transport import NeedsSsh
from orchestrator.head.nodes.node_list import Node
from tests.clusters.loopback import FaultyLoopback
from tests.clusters.require import require_sshd
from tests.head.connect.reading import keygen

PATIENCE = 60.0


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    fabric_login.agent_answers.cache_clear()
    load_key.cache_clear()


def add(agent: Path, key: Path) -> None:
    environment = {**os.environ, "SSH_AUTH_SOCK": str(agent)}
    subprocess.run(["ssh-add", "-q", str(key)], env=environment, check=True, capture_output=True)


@pytest.mark.parametrize("agent", ["", "/some/agent"])
def test_load_key_with_passphrase_points_to_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", agent)
    path = tmp_path / "my key"
    keygen("-t", "ed25519", "-N", "secret", "-f", path)
    start = "" if agent else 'eval "$(ssh-agent -s)"; '
    assert load_key(path) == (f"{path} needs a passphrase", f"{start}ssh-add '{path}'")


def test_load_key_refuses_key_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(mode=0o644)
    path.chmod(0o644)
    why, remedy = load_key(path)  # type: ignore[misc]
    assert str(why).endswith("mode 0644, and therefore not used")
    assert remedy == f"chmod 600 {path}"


def test_load_key_refuses_file_without_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("no key")
    (tmp_path / "key").chmod(0o600)
    assert str(load_key(tmp_path / "key")).startswith(f"('{tmp_path}/key is not a key that")
    assert load_key(tmp_path / "none") is None


# -- which keys are offered, in which order -----------------------------------------------------


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real ssh-agent with three keys."""
    path = tmp_path / "agent"
    with subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("SSH_AUTH_SOCK=")
        for name in ("one", "two", "three"):
            key = tmp_path / name
            keygen("-t", "ed25519", "-N", "", "-C", name, "-f", key)
            add(path, key)
            # The public half of the key stays.
            key.unlink()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        yield path
        running.terminate()


def offered(*paths: Path, only: bool = False) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the labels of the keys that are offered, and the keys that cannot be used."""
    keys = SshKeys(Destination("gpu01", "bob", 22, paths, only_these_keys=only))
    return [label_of(source) for source in keys.get_sources()], keys.unusable


def test_agent_keys_are_offered_in_order_of_config(
    agent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert offered() == (["agent: one", "agent: two", "agent: three"], [])
    # A key whose public half the config names comes first, or alone: servers hang up soon.
    for path in (tmp_path / "three.pub", tmp_path / "three"):
        assert offered(path) == (["agent: three", "agent: one", "agent: two"], [])
        assert offered(path, only=True) == (["agent: three"], [])
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "none"))
    fabric_login.agent_answers.cache_clear()
    assert offered() == ([], [])


def test_key_in_file_and_agent_is_offered_once(agent: Path, tmp_path: Path) -> None:
    keygen("-t", "ed25519", "-N", "", "-f", tmp_path / "mine")
    add(agent, tmp_path / "mine")
    labels, _ = offered(tmp_path / "mine")
    assert labels == [str(tmp_path / "mine"), "agent: one", "agent: two", "agent: three"]


def test_agent_that_hangs_costs_one_time_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fabric_login, "AGENT_SECONDS", 0.1)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "agent"))
        silent.listen()
        assert fabric_login.agent_keys() == []
        silent.accept()[0].close()
        silent.setblocking(False)
        assert fabric_login.agent_keys() == []
        with pytest.raises(BlockingIOError):
            silent.accept()


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


def test_security_key_is_offered_by_agent_alone(agent: Path, tmp_path: Path) -> None:
    """ssh lists such a key among the usual ones: another, which is good, counts as ever."""
    write_security_key(tmp_path / "id_sk")
    keygen("-t", "ed25519", "-N", "", "-f", tmp_path / "good")
    keys = (tmp_path / "id_sk", tmp_path / "good")
    labels, unusable = offered(*keys, only=True)
    assert labels == [str(tmp_path / "good")]
    assert unusable[0][0].startswith(f"{tmp_path / 'id_sk'} is not a key that paramiko reads")
    add(agent, tmp_path / "id_sk")
    labels, _ = offered(tmp_path / "good")
    assert labels[1:] == [f"agent: {name}" for name in ("one", "two", "three", "me")], "the last"
    assert offered(*keys)[0][1] == "agent: me", "it is named"


# -- logins that fail ---------------------------------------------------------------------------


def test_denied_names_command_for_first_key() -> None:
    there = Destination(host="gpu01", user="bob", port=22, keys=())
    copy = "ssh-copy-id -p 22 bob@gpu01"
    none = denied_error(there, [], 0, [])
    assert isinstance(none, NeedsSsh) and isinstance(none, NoKey)
    assert none.fix == f"once: ssh-keygen -t ed25519; then: {copy}"
    refused = denied_error(there, ["id_rsa"], 1, [])
    assert (refused.what, refused.fix) == ("it denies bob every key (id_rsa)", copy)


def test_denied_names_keys_that_could_not_be_used() -> None:
    there = Destination(host="gpu01", user="bob", port=22, keys=())
    locked = ("k1 needs a passphrase", "ssh-add k1")
    unread = ("k2 cannot be read", "")
    alone = denied_error(there, [], 0, [locked, unread])
    assert alone.what == ("no key of yours can be used: k1 needs a passphrase; k2 cannot be read")
    assert alone.fix == "ssh-add k1"
    beside = denied_error(there, ["k0"], 1, [locked])
    assert beside.what == "it denies bob every key (k0); k1 needs a passphrase: ssh-add k1"
    many = denied_error(there, ["k0", "k1"], 9, [])
    assert many.what == "it hung up on bob after 2 of 9 keys (k0, k1)"
    assert "IdentitiesOnly yes" in many.fix


# -- keys that only ssh can use ------------------------------------------------------------------


@pytest.fixture(scope="module")
def trusting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyLoopback]:
    """A host that lets in what an authority has signed, and the cluster's key."""
    require_sshd()
    directory = tmp_path_factory.mktemp("trusting")
    keygen("-t", "ed25519", "-N", "", "-f", directory / "authority")
    with FaultyLoopback(1, directory / "cluster") as cluster:
        there = cluster.node(0) / "sshd_config"
        there.write_text(f"TrustedUserCAKeys {directory}/authority.pub\n{there.read_text()}")
        cluster.kill_sshd(0)
        cluster.start_sshd(0)
        yield cluster


def log_in(cluster: FaultyLoopback, key: Path) -> object:
    text = cluster.ssh_config.read_text().replace(f'"{cluster.key}"', f'"{key}"')
    (key.parent / "config").write_text(text)
    ssh, node = SshTransport(SshConfig(key.parent / "config"), timeout=PATIENCE), Node("127.0.0.2")
    connection = ssh.connect(node)
    open_channel(connection, node, PATIENCE).connection.close()
    return connection


def test_pkcs8_key_goes_through_ssh(trusting: FaultyLoopback, tmp_path: Path) -> None:
    """ssh reads PKCS#8 as well, which openssl and many clouds write."""
    key, known = tmp_path / "id", trusting.node(0) / "authorized_keys"
    keygen("-t", "ecdsa", "-m", "PKCS8", "-N", "", "-f", key)
    assert key.read_text().startswith("-----BEGIN PRIVATE KEY-----")
    text = known.read_text()
    known.write_text(text + Path(f"{key}.pub").read_text())
    try:
        connection = log_in(trusting, key)
    finally:
        known.write_text(text)
    assert isinstance(connection, SshProcess) and "is not a key that" in connection.way.why


def test_key_with_certificate_goes_through_ssh(trusting: FaultyLoopback, tmp_path: Path) -> None:
    key, authority = tmp_path / "id", trusting.directory.parent / "authority"
    keygen("-t", "ed25519", "-N", "", "-f", key)
    there = Destination("gpu01", "bob", 22, (key, tmp_path / "id.pub"))
    assert certificate_of(there) == ""
    keygen("-s", authority, "-I", "x", "-n", getpass.getuser(), "-V", "+1h", f"{key}.pub")
    assert certificate_of(there) == str(tmp_path / "id-cert.pub")
    assert isinstance(log_in(trusting, key), SshProcess)
