"""Connections that are held between commands: reused where they may be, and never in the way."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.common.errors import NodeError
from orchestrator.config.launch import Where
from orchestrator.head.commands.machines import warm
from orchestrator.head.connect import ssh_config, tasks
from orchestrator.head.connect.held import control, process, transport, wire
from orchestrator.head.connect.held.control import Holding
from orchestrator.head.connect.held.transport import HeldTransport
from orchestrator.head.connect.reach import open_channel
from orchestrator.head.connect.ssh import SshTransport
from orchestrator.head.connect.ssh_config import Route, SshConfig
from orchestrator.protocol.requests.follow import Jobs
from tests.conftest import Cluster
from tests.launching import Head

PATIENCE = 60.0
pytestmark = [
    pytest.mark.filterwarnings("error::ResourceWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]
WAIT = """
import os, sys, time
print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
print("done", flush=True)
"""


class Commands:
    """Somebody who types commands, each a process with a transport of its own."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster = cluster
        self.config = directory / "ssh_config"
        self.known_hosts = directory / "known_hosts"
        given = [
            line
            for line in cluster.ssh_config.read_text().splitlines()
            if "UserKnownHostsFile" not in line
        ]
        self.write_config(*given, f'    UserKnownHostsFile "{self.known_hosts}"')

    def write_config(self, *lines: str) -> None:
        self.lines = lines
        self.config.write_text("\n".join([*lines, ""]))

    def ssh(self, *, strict: bool = False) -> HeldTransport:
        ssh_config.read_again()  # as each command does
        return HeldTransport(SshConfig(self.config), timeout=PATIENCE, strict=strict)

    def node(self, i: int, **more: object) -> SimpleNamespace:
        names = ("user", "port", "python", "activate", "wrap")
        values = {"host": self.cluster.addresses[i], **dict.fromkeys(names)}
        return SimpleNamespace(**{**values, **more})

    def hold(self, *hosts: int, idle: float = PATIENCE) -> Holding:
        nodes = [self.node(i) for i in hosts]
        assert warm.keep(self.ssh(), nodes, idle, patience=PATIENCE)
        return self.wait(lambda held: all(one.state != "connecting" for one in held.connections))

    def wait(self, until: Callable[[Holding], bool]) -> Holding:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            held = control.holding()
            assert held is not None
            if until(held):
                return held
            time.sleep(0.01)
        raise AssertionError(str(held))

    def logins(self, i: int) -> int:
        """How often somebody has logged in to a host."""
        return (self.cluster.node(i) / "sshd.log").read_text().count("Accepted publickey")

    def says(self, i: int, command: str = "echo hi", *, strict: bool = False) -> tuple[bytes, bool]:
        """What a command prints on a host, and whether it had to log in."""
        ssh = self.ssh(strict=strict)
        connection = ssh.connect(ssh.config.of_node(self.node(i)))
        output = all_of(connection.run(command, PATIENCE))
        connection.close()
        return output, ssh.ssh is not None


def all_of(channel: object) -> bytes:
    return b"".join(iter(lambda: channel.recv(1 << 20), b""))  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def patient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A home of its own, and time for a machine that is busy; nothing is left behind."""
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / ("a home " + "x" * 150)))
    monkeypatch.setattr(transport, "PATIENCE_SECONDS", PATIENCE)
    monkeypatch.setattr(control, "PATIENCE_SECONDS", PATIENCE)
    yield
    control.end()
    assert control.holding() is None


@pytest.fixture
def commands(two_nodes: Cluster, tmp_path: Path) -> Commands:
    return Commands(two_nodes, tmp_path)


def test_a_process_that_answers_others_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has hundreds to answer; one that answers nobody is not waited for."""
    monkeypatch.setattr(transport, "PATIENCE_SECONDS", 0.1)
    ssh = HeldTransport(SshConfig())
    ours, theirs = tasks.Socket.pair()
    assert not ssh.hears(ours)
    looks = []

    def ready(file: int, event: int, seconds: float) -> bool:
        looks.append(tasks.ready(file, event, 0.0))
        ssh.heard = time.monotonic()  # another task has its answer
        if len(looks) == 3:
            theirs.sendall(b"x")
        return looks[-1]

    monkeypatch.setattr(transport, "tasks", SimpleNamespace(ready=ready))
    with ours, theirs:
        assert ssh.hears(ours) and looks == [False, False, False, True]


def test_the_second_command_makes_no_login(commands: Commands) -> None:
    assert commands.says(0) == (b"hi\n", True), "without anybody who holds connections"
    assert {one.state for one in commands.hold(0, 1).connections} == {"open"}
    before = commands.logins(0), commands.logins(1)
    assert commands.says(0) == commands.says(1) == (b"hi\n", False)
    ssh = commands.ssh(strict=True)  # known_hosts has it by now
    connection = ssh.connect(ssh.config.of_node(commands.node(0)))
    assert connection.address == commands.cluster.addresses[0]
    channel = open_channel(connection, commands.node(0), PATIENCE)  # our server at the other end
    assert channel.ask(Jobs(), PATIENCE).jobs == ()
    more = connection.run("cat >&2; exit 3", PATIENCE)  # another one beside it
    more.sendall(b"to stderr")
    more.shutdown_write()
    assert all_of(more) == b"" and more.recv_stderr(100) == b"to stderr"
    assert more.recv_exit_status() == 3
    connection.close()
    assert ssh.ssh is None
    assert (commands.logins(0), commands.logins(1)) == before
    commands.wait(lambda held: all(one.sessions == 0 for one in held.connections))


def test_a_connection_is_for_what_led_to_it(commands: Commands) -> None:
    commands.hold(0)
    recorded = commands.known_hosts.read_text()
    assert commands.says(0)[1] is False
    config = commands.config.read_text()
    commands.config.write_text(f"{config}    ConnectTimeout 7\n")
    assert commands.says(0)[1] is False, "what has nothing to do with the connection"
    commands.config.write_text(f"{config}    Ciphers aes256-gcm@openssh.com\n")
    assert commands.says(0)[1] is True, "another way to connect"
    commands.config.write_text(config)
    key = commands.cluster.directory / "key"
    os.utime(key)
    assert commands.says(0)[1] is True, "another key, for all that is known"
    commands.hold(0)
    assert commands.says(0)[1] is False
    commands.known_hosts.write_text("")
    with pytest.raises(NodeError, match="is not known"):
        commands.says(0, strict=True)
    commands.known_hosts.write_text(recorded)
    commands.hold(0)
    assert commands.says(0)[1] is False
    name, kind, blob = recorded.split()[:3]
    commands.known_hosts.write_text(f"{name} {kind} {blob[:-8]}AAAAAAA=\n")
    with pytest.raises(NodeError, match="has changed"):
        commands.says(0)


def test_behind_a_jump_host(commands: Commands) -> None:
    first, second = commands.cluster.addresses
    config = commands.config.read_text()
    commands.config.write_text(f"Host {second}\n    ProxyJump {first}\nHost *\n{config}")
    commands.hold(1)
    logins = commands.logins(0), commands.logins(1)
    assert commands.says(1) == (b"hi\n", False)
    assert (commands.logins(0), commands.logins(1)) == logins
    lines = commands.known_hosts.read_text().splitlines()
    assert len(lines) == 2
    commands.known_hosts.write_text("\n".join(line for line in lines if second in line) + "\n")
    with pytest.raises(NodeError, match=r"jump host.*is not known"):
        commands.says(1, strict=True)


def test_a_connection_that_died_costs_a_login_and_no_more(commands: Commands) -> None:
    commands.hold(0, 1)
    commands.cluster.kill_sshd(0)
    commands.wait(lambda held: held.connections[0].state == "lost")
    for hosts, code in (([1], 0), ([0, 1], 4)):  # only those that were asked for
        listed = commands.cluster.write_list([commands.cluster.addresses[i] for i in hosts], "l")
        where = Where(nodes=listed, ssh_config=commands.config)
        assert warm.connections(where, idle="1m", close=False, as_json=True) == code
    with pytest.raises(NodeError, match="refuses connections"):
        commands.says(0)
    commands.cluster.start_sshd(0)
    assert commands.says(0) == (b"hi\n", True)
    commands.hold(0, 1)
    assert commands.says(0) == (b"hi\n", False)
    held = control.holding()
    assert held is not None
    os.kill(held.pid, signal.SIGSTOP)
    try:
        transport.PATIENCE_SECONDS = 0.2  # of a process that does not answer
        assert commands.says(0) == (b"hi\n", True)
    finally:
        transport.PATIENCE_SECONDS = PATIENCE
        os.kill(held.pid, signal.SIGCONT)
    ssh = commands.ssh()
    connection = ssh.connect(ssh.config.of_node(commands.node(0)))
    running = connection.run("cat", PATIENCE)
    os.kill(held.pid, signal.SIGKILL)
    assert running.recv(100) == b""  # as when a connection breaks
    connection.close()
    assert commands.says(0) == (b"hi\n", True)


def test_nobody_else_gets_in(commands: Commands, tmp_path: Path) -> None:
    commands.hold(0)
    where = wire.directory()
    assert where.stat().st_mode & 0o777 == 0o700
    where.chmod(0o777)
    assert control.holding() is None, "somebody else could have put another socket there"
    where.chmod(0o700)
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            os.chdir(where)
            where.chmod(0o777)
            Path(wire.name()).chmod(0o777)
            os.setresuid(65534, 65534, 65534)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(wire.name())
                with contextlib.suppress(ConnectionError):
                    wire.send(sock, {"do": "list"})
                    assert sock.recv(100) == b""
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    where.chmod(0o700)
    assert commands.says(0) == (b"hi\n", False)


def test_a_name_that_leads_elsewhere_now(commands: Commands, monkeypatch: Any) -> None:
    """Cloned machines may have one host key, so that it cannot tell one from the other."""
    ssh = commands.ssh()
    destination = replace(ssh.config.of_node(commands.node(0)), host="gpunode", alias="node")
    places = {"gpunode": commands.cluster.addresses[0]}
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest: real(places.get(host, host), *rest)
    )
    connection = SshTransport(ssh.config, timeout=PATIENCE).connect(destination)
    with contextlib.closing(connection):
        process.trust(Route((destination,)), connection, strict=True)
        places["gpunode"] = commands.cluster.addresses[1]
        with pytest.raises(NodeError, match=r"gpunode is not at .* any more"):
            process.trust(Route((destination,)), connection, strict=True)


def test_many_bytes_and_slow_readers(commands: Commands) -> None:
    commands.hold(0)
    ssh = commands.ssh()
    connection = ssh.connect(ssh.config.of_node(commands.node(0)))
    size = 20_000_000
    slow = connection.run(f"head -c {size} /dev/zero; echo end >&2", PATIENCE)
    time_out = connection.run("sleep 1000", PATIENCE)
    time_out.settimeout(0.01)
    with pytest.raises(TimeoutError):
        time_out.recv(1)
    echo = connection.run("cat", PATIENCE)
    sender = threading.Thread(target=lambda: (echo.sendall(bytes(size)), echo.shutdown_write()))
    sender.start()
    assert len(all_of(echo)) == size, "while nobody reads the other one"
    sender.join()
    assert len(all_of(slow)) == size
    assert slow.recv_stderr(10) == b"end\n"
    connection.close()
    assert ssh.ssh is None
    commands.wait(lambda held: held.connections[0].sessions == 0)


def gone(pid: int) -> None:
    """Wait for the end of a process."""
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        assert control._gone(process)
        os.close(process)


def test_it_ends_when_it_is_of_no_use(two_nodes: Cluster, commands: Commands) -> None:
    gone(commands.hold(0, idle=0.1).pid)
    held = commands.hold(0)
    (wire.directory() / wire.name()).unlink()
    gone(held.pid)
    held = commands.hold(0)
    two_nodes.kill_sshd(0)
    gone(held.pid)  # there is nothing left to hold
    two_nodes.start_sshd(0)
    commands.hold(0)
    ended = control.end()
    assert ended is not None and [one.state for one in ended.connections] == ["open"]
    assert control.holding() is None


def test_another_version_is_replaced(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    old = commands.hold(0)
    with monkeypatch.context() as newer:
        newer.setattr(wire, "program", lambda: "another")
        assert commands.says(0)[1] is True
    assert commands.says(0)[1] is False
    ssh = commands.ssh()
    connection = ssh.connect(ssh.config.of_node(commands.node(0)))
    running = connection.run("cat", PATIENCE)
    programs = iter(["another"])
    real = wire.program()
    with monkeypatch.context() as newer:
        newer.setattr(wire, "program", lambda: next(programs, real))
        assert commands.hold(0).pid != old.pid
    assert commands.says(0)[1] is False
    running.sendall(b"still")
    assert running.recv(10) == b"still", "a command that uses the old one goes on"
    connection.close()
    gone(old.pid)


def test_a_launch_over_held_connections(commands: Commands, tmp_path: Path) -> None:
    """All that a launch does, without a login; what holds its connections dies in the middle."""
    head = Head(commands.cluster, tmp_path)
    opened = head.command("orchestrator", "connections", "--open", "5m")
    assert opened.finish() == 0, opened.text
    logins = commands.logins(0), commands.logins(1)
    go = tmp_path / "go"
    command = head.launch("--no-torchrun", head.script("wait.py", WAIT), str(go))
    command.wait_for_all("node0 rank0 . ready", "node1 rank1 . ready")
    assert (commands.logins(0), commands.logins(1)) == logins
    held = control.holding()
    assert held is not None and [one.sessions for one in held.connections] == [1, 1]
    os.kill(held.pid, signal.SIGKILL)
    command.wait_for_all("node 0 .*is back", "node 1 .*is back")
    go.touch()
    assert command.finish() == 0, command.text
    assert {"node0 rank0 | done", "node1 rank1 | done"} <= set(command.lines)


def test_an_answer_that_is_quicker_than_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short command may be over, and its socket closed, before the question's send returns."""
    here, there = socket.socketpair()
    real = socket.send_fds

    def send_fds(sock: socket.socket, *rest: Any) -> int:
        sent = real(sock, *rest)
        there.close()
        return sent

    monkeypatch.setattr(socket, "send_fds", send_fds)
    wire.send(here, {"do": "run"}, [here.fileno()])
    here.close()
