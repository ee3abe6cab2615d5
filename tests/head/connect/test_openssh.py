"""Nodes that the ssh program reaches: by what it holds open, or what it alone can do."""

import contextlib
import os
import select
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
from orchestrator.head.connect import fabric_login
from orchestrator.head.connect.openssh import SshProcess
from orchestrator.head.connect.reach import open_channel
from orchestrator.head.connect.ssh import SshTransport
from orchestrator.head.connect.ssh_config import Destination, SshConfig
from orchestrator.head.connect.way import Way
from orchestrator.head.nodes.node_list import Node
from tests.clusters.loopback import FaultyLoopback
from tests.clusters.require import require_sshd
from tests.head.connect.reading import read_again

pytestmark = pytest.mark.slow

PATIENCE = 60.0
# Connects to a host and port, and passes the socket on, as `nc -F` does.
FD_PASS = """
import socket, sys
there = socket.create_connection((sys.argv[1], int(sys.argv[2])))
socket.send_fds(socket.socket(fileno=1), [b"x"], [there.fileno()])
"""
# Carries bytes between its streams and a host and port, and writes down its process ID.
RELAY = """
import os, socket, sys, threading
open(sys.argv[1], "w").write(str(os.getpid()))
there = socket.create_connection((sys.argv[2], int(sys.argv[3])))
def back():
    while data := there.recv(65536):
        os.write(1, data)
threading.Thread(target=back, daemon=True).start()
while data := os.read(0, 65536):
    there.sendall(data)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyLoopback]:
    require_sshd()
    with FaultyLoopback(2, tmp_path_factory.mktemp("open ssh") / "cluster") as running:
        yield running


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A directory with a short name: those of sockets have 107 bytes, and ssh adds some."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


class Desk:
    """A user with an ssh_config, who opens a connection by hand."""

    def __init__(self, cluster: FaultyLoopback, directory: Path, lines: str) -> None:
        first, second = cluster.addresses
        self.file = directory / "config"
        self.file.write_text(
            f"Host one\n HostName {first}\nHost two\n HostName {second}\n ProxyJump one\n"
            f"Host one two\n{lines}\nHost *\n{cluster.ssh_config.read_text()}"
        )
        read_again()

    def ssh(self, *words: str) -> None:
        # A master that stays keeps its inherited files.
        null = subprocess.DEVNULL
        command = ["ssh", "-F", str(self.file), *words]
        subprocess.run(command, stdin=null, stdout=null, stderr=null, check=True)

    def connect(self, node: str, *, strict: bool = False) -> object:
        """Reach a node as commands do, and have our server there."""
        way = SshTransport(SshConfig(self.file), timeout=PATIENCE, strict=strict)
        connection = way.connect(Node(node))
        channel = open_channel(connection, Node(node), PATIENCE)
        channel.close()
        connection.close()
        return connection

    def run(self, node: str, line: str) -> tuple[int, bool]:
        """Return the exit code of a command, and whether the connection is well afterwards."""
        way = SshTransport(SshConfig(self.file), timeout=PATIENCE)
        connection = way.connect(Node(node))
        channel = connection.run(f"echo begun; read x; {line}", PATIENCE)
        assert channel.recv(100) == b"begun\n"
        channel.sendall(b"go\n")
        while channel.recv(100):
            pass
        return channel.recv_exit_status(), connection.alive


def test_connect_uses_open_control_master(
    cluster: FaultyLoopback, tmp_path: Path, sockets: Path
) -> None:
    desk = Desk(cluster, tmp_path, f"ControlPath {sockets}/%C\nRemoteCommand tmux\n")
    desk.ssh("-fNM", "-o", "RemoteCommand=none", "one")
    try:
        cluster.deny_keys(0)
        connection = desk.connect("one")
        assert isinstance(connection, SshProcess) and connection.address == cluster.addresses[0]
        assert desk.run("one", "exit 7") == (7, True)
        assert desk.run("one", "kill -9 $PPID") == (-1, False)
        with pytest.raises(NodeError, match="it denies"):
            desk.connect("one")
    finally:
        cluster.allow_keys(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be others")
def test_connect_ignores_socket_of_other_user(
    cluster: FaultyLoopback, tmp_path: Path, sockets: Path
) -> None:
    desk = Desk(cluster, tmp_path, f"ControlPath {sockets}/path\n")
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(f"{sockets}/path")
        os.chown(f"{sockets}/path", 65534, 65534)
        theirs.listen()
        theirs.settimeout(0.0)
        assert not isinstance(desk.connect("one"), SshProcess)
        with pytest.raises(BlockingIOError):
            theirs.accept()


def test_control_master_of_jump_host_is_used(
    cluster: FaultyLoopback, tmp_path: Path, sockets: Path
) -> None:
    desk = Desk(cluster, tmp_path, f"ControlPath {sockets}/%C\n")
    assert not isinstance(desk.connect("two"), SshProcess)
    desk.ssh("-fNM", "one")
    try:
        cluster.deny_keys(0)
        connection = desk.connect("two", strict=True)
        assert isinstance(connection, SshProcess) and connection.address == ""
    finally:
        cluster.allow_keys(0)
        desk.ssh("-O", "exit", "one")
    assert not isinstance(desk.connect("two"), SshProcess)


def test_full_control_master_is_named(
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
    ("lines", "why"),
    [
        ("Ciphers chacha20-poly1305@openssh.com", "ciphers is set"),
        ("ProxyUseFdpass yes\nProxyCommand {python} {fd_pass} %h %p", "proxycommand is set"),
        ("HostbasedAuthentication yes\nIdentityFile {none}", "no key"),
    ],
)
def test_host_that_needs_ssh_goes_through_ssh(
    cluster: FaultyLoopback,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: str,
    why: str,
) -> None:
    (tmp_path / "pass.py").write_text(FD_PASS)
    python, fd_pass = shlex.quote(sys.executable), shlex.quote(str(tmp_path / "pass.py"))
    desk = Desk(cluster, tmp_path, lines.format(python=python, fd_pass=fd_pass, none="/no/key"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    if "IdentityFile" not in lines:
        connection = desk.connect("one")
        assert isinstance(connection, SshProcess) and why in connection.way.why
    cluster.deny_keys(0)
    try:
        with pytest.raises(NodeError, match=r"ssh itself says: .*Permission denied"):
            desk.connect("one")
    finally:
        cluster.allow_keys(0)


@pytest.mark.parametrize(
    ("methods", "copies"),
    [("publickey,password", "copy your key there with ssh-copy-id, or "), ("publickey", "")],
)
def test_refusal_names_ssh_copy_id_where_password_is_accepted(methods: str, copies: str) -> None:
    connection = SshProcess(("ssh",), "gpu1", Way("ssh", "it is new"), "ssh gpu1 true", None)
    refused = connection.refusal(f"me@gpu1: Permission denied ({methods}).\n")
    assert refused.fix == f"{copies}try: ssh gpu1 true"


def test_silent_proxy_command_times_out(cluster: FaultyLoopback, tmp_path: Path) -> None:
    desk = Desk(cluster, tmp_path, "ProxyCommand sleep 7654")
    way = SshTransport(SshConfig(desk.file), timeout=1.0)
    with pytest.raises(NodeError):
        open_channel(way.connect(Node("one")), Node("one"), 1.0)


def test_proxy_command_ends_with_connection(cluster: FaultyLoopback, tmp_path: Path) -> None:
    relay = tmp_path / "relay.py"
    relay.write_text(RELAY)
    proxy = f"ProxyCommand {shlex.quote(sys.executable)} {relay} {tmp_path}/pid %h %p"
    desk = Desk(cluster, tmp_path, proxy)
    way = SshTransport(SshConfig(desk.file), timeout=PATIENCE)
    connection = way.connect(Node("one"))
    assert connection.address == ""
    channel = connection.run("echo begun; cat", PATIENCE)
    assert channel.recv(100) == b"begun\n"
    process = os.pidfd_open(int((tmp_path / "pid").read_text()))
    try:
        connection.close()
        assert select.select([process], [], [], PATIENCE)[0], "it stayed behind"
    finally:
        os.close(process)


def test_changed_host_key_is_named(cluster: FaultyLoopback, tmp_path: Path) -> None:
    desk = Desk(cluster, tmp_path, "Ciphers chacha20-poly1305@openssh.com")
    cluster.change_host_key(0)
    try:
        with pytest.raises(NodeError, match=r"its host key has changed: see .*known_hosts:1;"):
            desk.connect("one")
    finally:
        cluster.restore_host_key(0)


@pytest.mark.parametrize("lines", ["Ciphers chacha20-poly1305@openssh.com", "UserKnownHostsFile /"])
def test_strict_checking_refuses_unknown_host(
    cluster: FaultyLoopback, tmp_path: Path, lines: str
) -> None:
    desk = Desk(cluster, tmp_path, f"{lines}\nUserKnownHostsFile {tmp_path}/known")
    with pytest.raises(NodeError, match="its host key is not known"):
        desk.connect("one", strict=True)
    assert not (tmp_path / "known").exists()


def test_new_host_without_ssh_program_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    there = Destination("127.0.0.1", "bob", 1, (), settings={"proxycommand": ("nc",)})
    with pytest.raises(NodeError, match="its host key is not known, and there is no ssh here"):
        SshTransport(SshConfig()).connect_to(there, 10.0)


def test_key_refused_by_agent_does_not_block_next_key(
    cluster: FaultyLoopback, tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric_login.agent_answers.cache_clear()
    monkeypatch.setenv("SSH_AUTH_SOCK", str(sockets / "agent"))
    monkeypatch.delenv("DISPLAY", raising=False)
    desk = Desk(cluster, tmp_path, "IdentityFile /no/key\nIdentitiesOnly no")
    desk.file.write_text(desk.file.read_text().replace(f'"{cluster.key}"', "/no/key"))
    known = cluster.node(0) / "authorized_keys"
    text = known.read_text()
    with subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(sockets / "agent")], stdout=subprocess.PIPE
    ) as agent:
        assert agent.stdout is not None and agent.stdout.readline()
        add = ["ssh-add", "-q"]
        # No program is there to confirm its use.
        subprocess.run([*add, "-c", str(cluster.key)], check=True)
        with pytest.raises(NodeError, match=r"it hung up on the key agent: .*Permission denied"):
            desk.connect("one")
        other = sockets / "other"
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", str(other)], check=True)
        subprocess.run([*add, str(other)], check=True)
        known.write_text(text + other.with_suffix(".pub").read_text())
        try:
            desk.connect("one")
        finally:
            known.write_text(text)
            agent.terminate()


# -- sshd of others -----------------------------------------------------------------------------


class Opens(paramiko.ServerInterface):
    """Lets in all who ask with nothing, as Tailscale's does, once `may` is set."""

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

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self.over.wait()
        return paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        threading.Thread(target=answer, args=(channel, command)).start()
        return True


def answer(channel: paramiko.Channel, command: bytes) -> None:
    channel.sendall(b"ran " + command)
    channel.send_exit_status(0)
    channel.close()


@contextlib.contextmanager
def served(opens: Opens, tmp_path: Path, key: Path) -> Iterator[tuple[SshTransport, Destination]]:
    """A server that takes any number of connections, and the way to it with this key."""
    fabric_login.agent_answers.cache_clear()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server = paramiko.Transport(listener.accept()[0])
                    server.add_server_key(paramiko.ECDSAKey.generate())
                    server.start_server(threading.Event(), opens)

        threading.Thread(target=serve, daemon=True).start()
        (tmp_path / "config").write_text(
            f'IdentityFile "{key}"'
            "\nIdentitiesOnly yes\nUserKnownHostsFile /dev/null\n"
            "GlobalKnownHostsFile /dev/null\n"
        )
        ssh = SshTransport(SshConfig(tmp_path / "config"), timeout=PATIENCE)
        try:
            yield ssh, ssh.config.destination("127.0.0.1", port=listener.getsockname()[1])
        finally:
            opens.over.set()


def test_ssh_login_without_authentication_works(tmp_path: Path) -> None:
    with served(Opens(may=True), tmp_path, Path("/no/key")) as (ssh, there):
        connection = ssh.connect_to(there, PATIENCE)
        assert isinstance(connection, SshProcess)
        assert connection.run("this", PATIENCE).recv(100) == b"ran this"
        connection.close()


@pytest.mark.parametrize("by", ["ssh", "fabric"])
def test_banner_of_waiting_login_is_shown(cluster: FaultyLoopback, tmp_path: Path, by: str) -> None:
    key = cluster.key if by == "fabric" else Path("/no/key")
    with (
        served(Opens(may=False), tmp_path, key) as (ssh, there),
        pytest.raises(NodeError, match=r"says: .*# visit: https://login.ex"),
    ):
        open_channel(ssh.connect_to(there, 3.0), Node("127.0.0.1"), 3.0)
