"""What the user's own ssh has open, or alone can do, is gone by."""

from __future__ import annotations

import getpass
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest

from orchestrator.common.errors import NodeError
from orchestrator.head.connect import ssh_config
from orchestrator.head.connect.held.transport import HeldTransport
from orchestrator.head.connect.reach import open_channel
from orchestrator.head.connect.ssh import SshTransport
from orchestrator.head.connect.ssh_config import Destination, SshConfig
from orchestrator.head.connect.subprocess_transport import OwnSsh
from orchestrator.head.nodes.node_list import Node
from tests.clusters.loopback import FaultyLoopback
from tests.clusters.require import require_sshd

PATIENCE = 60.0
# Connects to a host and port, and passes the socket on, as `nc -F` does.
FD_PASS = """
import socket, sys
there = socket.create_connection((sys.argv[1], int(sys.argv[2])))
socket.send_fds(socket.socket(fileno=1), [b"x"], [there.fileno()])
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyLoopback]:
    require_sshd()
    with FaultyLoopback(2, tmp_path_factory.mktemp("own ssh") / "cluster") as running:
        yield running


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A directory with a short name: those of sockets have 107 bytes, and ssh adds some."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


class Desk:
    """Somebody with an ssh_config, who opens a connection by hand."""

    def __init__(self, cluster: FaultyLoopback, directory: Path, lines: str) -> None:
        first, second = cluster.addresses
        self.file = directory / "config"
        self.file.write_text(
            f"Host one\n HostName {first}\nHost two\n HostName {second}\n ProxyJump one\n"
            f"Host one two\n{lines}\nHost *\n{cluster.ssh_config.read_text()}"
        )
        ssh_config.read_again()

    def ssh(self, *words: str) -> None:
        null = subprocess.DEVNULL  # a master that goes on keeps what it was given
        command = ["ssh", "-F", str(self.file), *words]
        subprocess.run(command, stdin=null, stdout=null, stderr=null, check=True)

    def connect(self, node: str, *, strict: bool = False) -> object:
        """Reach a node as commands do, and have our server there."""
        way = HeldTransport(SshConfig(self.file), timeout=PATIENCE, strict=strict)
        connection = way.connect(way.config.of_node(Node(node)))
        channel = open_channel(connection, Node(node), PATIENCE)
        channel.close()
        connection.close()
        return connection

    def run(self, node: str, line: str) -> tuple[int, bool]:
        """Return the exit code of a command, and whether the connection is well afterwards."""
        way = HeldTransport(SshConfig(self.file), timeout=PATIENCE)
        connection = way.connect(way.config.of_node(Node(node)))
        channel = connection.run(f"echo begun; read x; {line}", PATIENCE)
        assert channel.recv(100) == b"begun\n"
        channel.sendall(b"go\n")
        while channel.recv(100):
            pass
        return channel.recv_exit_status(), connection.alive


def test_a_connection_that_is_open_lets_us_in(
    cluster: FaultyLoopback, tmp_path: Path, sockets: Path
) -> None:
    """Also where keys alone do not, as where a second factor is asked for."""
    desk = Desk(cluster, tmp_path, f"ControlPath {sockets}/%C\nRemoteCommand tmux\n")
    desk.ssh("-fNM", "-o", "RemoteCommand=none", "one")
    try:
        cluster.deny_keys(0)
        connection = desk.connect("one")
        assert isinstance(connection, OwnSsh) and connection.address == cluster.addresses[0]
        assert desk.run("one", "exit 7") == (7, True)
        assert desk.run("one", "kill -9 $PPID") == (-1, False)
        with pytest.raises(NodeError, match="it denies"):
            desk.connect("one")
    finally:
        cluster.allow_keys(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be others")
def test_a_socket_of_somebody_else_is_no_connection(
    cluster: FaultyLoopback, tmp_path: Path, sockets: Path
) -> None:
    desk = Desk(cluster, tmp_path, f"ControlPath {sockets}/path\n")
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(f"{sockets}/path")
        os.chown(f"{sockets}/path", 65534, 65534)
        theirs.listen()
        theirs.settimeout(0.0)
        assert not isinstance(desk.connect("one"), OwnSsh)
        with pytest.raises(BlockingIOError):
            theirs.accept()


def test_one_to_a_jump_host_leads_to_those_behind(
    cluster: FaultyLoopback, tmp_path: Path, sockets: Path
) -> None:
    desk = Desk(cluster, tmp_path, f"ControlPath {sockets}/%C\n")
    assert not isinstance(desk.connect("two"), OwnSsh)
    desk.ssh("-fNM", "one")
    try:
        cluster.deny_keys(0)
        connection = desk.connect("two", strict=True)
        assert isinstance(connection, OwnSsh) and connection.address == ""
    finally:
        cluster.allow_keys(0)
        desk.ssh("-O", "exit", "one")
    assert not isinstance(desk.connect("two"), OwnSsh)


def test_one_that_takes_no_further_command_is_named(
    cluster: FaultyLoopback, tmp_path: Path, sockets: Path
) -> None:
    config = cluster.node(1) / "sshd_config"
    config.write_text("MaxSessions 1\n" + config.read_text())
    cluster.kill_sshd(1)
    cluster.start_sshd(1)
    desk = Desk(cluster, tmp_path, f"ControlPath {sockets}/%C\n")
    desk.ssh("-fNM", "two")
    words = ["ssh", "-F", str(desk.file), "two", "cat"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe) as only:
        assert only.stdin is not None and only.stdout is not None
        only.stdin.write(b"begun\n")
        only.stdin.flush()
        assert only.stdout.readline() == b"begun\n"
        cluster.deny_keys(1)
        try:
            with pytest.raises(NodeError, match="refused by peer") as refused:
                desk.connect("two")
            assert "MaxSessions" in refused.value.fix
        finally:
            cluster.allow_keys(1)
    desk.ssh("-O", "exit", "two")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("Ciphers chacha20-poly1305@openssh.com", "Ciphers of your ssh_config"),
        ("ProxyUseFdpass yes\nProxyCommand {python} {fd_pass} %h %p", "can do ProxyUseFdpass"),
        ("HostbasedAuthentication yes\nIdentityFile {file}", ""),
    ],
)
def test_what_ssh_alone_can_do_it_does(
    cluster: FaultyLoopback, tmp_path: Path, lines: str, words: str
) -> None:
    (tmp_path / "pass.py").write_text(FD_PASS)
    python, fd_pass = shlex.quote(sys.executable), shlex.quote(str(tmp_path / "pass.py"))
    values = {"python": python, "fd_pass": fd_pass, "file": "/dev/null"}
    desk = Desk(cluster, tmp_path, lines.format(**values))
    if words:
        assert isinstance(desk.connect("one"), OwnSsh)
    cluster.deny_keys(0)
    try:
        with pytest.raises(NodeError, match=f"{words}.*; ssh itself says: .*Permission denied"):
            desk.connect("one")
    finally:
        cluster.allow_keys(0)


def test_without_ssh_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    there = Destination("gpu01", "bob", 22, (), only_ssh=("ProxyUseFdpass",))
    with pytest.raises(NodeError, match="only ssh itself can do ProxyUseFdpass"):
        HeldTransport(SshConfig()).connect(there)


def test_a_key_that_its_agent_refuses_stands_in_nobodys_way(
    cluster: FaultyLoopback, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user does not confirm it; another one is known, too."""
    monkeypatch.setenv("SSH_AUTH_SOCK", str(sockets / "agent"))
    monkeypatch.delenv("DISPLAY", raising=False)
    known = cluster.node(0) / "authorized_keys"
    with subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(sockets / "agent")], stdout=subprocess.PIPE
    ) as agent:
        assert agent.stdout is not None and agent.stdout.readline()
        add = ["ssh-add", "-q"]
        subprocess.run([*add, "-c", str(cluster.key)], check=True)  # nobody is there to confirm
        first, port = cluster.nodes[0].address, cluster.nodes[0].port
        there = Destination(first, getpass.getuser(), port, (), lax=True)
        way = SshTransport(SshConfig(), timeout=PATIENCE)
        with pytest.raises(NodeError, match="the agent refuses to sign"):
            way.connect(there)
        text = known.read_text()
        other = sockets / "other"
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", str(other)], check=True)
        subprocess.run([*add, str(other)], check=True)
        known.write_text(text + other.with_suffix(".pub").read_text())
        way.connect(there).close()
        known.write_text(text)
        agent.terminate()


# -- sshd of others -----------------------------------------------------------------------------


class Opens(paramiko.ServerInterface):
    """Lets everybody in who asks with nothing, as Tailscale's does, once `may` is set."""

    def __init__(self, may: bool) -> None:
        self.may, self.over = may, threading.Event()

    def get_banner(self) -> tuple[str, str]:
        return "# To authenticate,\n# visit: https://login.example/a/1\r\n", "en"

    def get_allowed_auths(self, username: str) -> str:
        return "none"

    def check_auth_none(self, username: str) -> int:
        if not self.may:
            self.over.wait()
        return paramiko.AUTH_SUCCESSFUL


def log_in(opens: Opens, timeout: float) -> None:
    """Log in there, with a key that it does not want."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = Destination("127.0.0.1", "bob", listener.getsockname()[1], (), lax=True)

        def serve() -> None:
            server = paramiko.Transport(listener.accept()[0])
            server.add_server_key(paramiko.ECDSAKey.generate())
            server.start_server(threading.Event(), opens)
            opens.over.wait()
            server.close()

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            SshTransport(SshConfig()).connect(there, timeout).close()
        finally:
            opens.over.set()
            serving.join()


def test_who_asks_for_nothing_is_given_nothing() -> None:
    log_in(Opens(may=True), PATIENCE)


def test_what_a_login_that_waits_says_is_shown() -> None:
    with pytest.raises(NodeError, match=r"says: # To authenticate, # visit: https://login.ex"):
        log_in(Opens(may=False), 3.0)
