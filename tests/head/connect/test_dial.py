"""The way to a host: its name, its addresses, its jump hosts, and servers with no room."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import pytest

from orchestrator.common.errors import NodeError
from orchestrator.head.connect import fabric_login
from orchestrator.head.connect.fabric_login import no_way_on
from orchestrator.head.connect.ssh import SshTransport
from orchestrator.head.connect.ssh_config import Destination, SshConfig
from orchestrator.head.nodes.node_list import Node
from tests.clusters.netns import NetnsCluster

PATIENCE = 30.0


def known(directory: Path, host: str, port: int) -> Destination:
    """Return a destination that known_hosts has, so that fabric calls it."""
    file, key = directory / "known_hosts", paramiko.ECDSAKey.generate()
    there = Destination(host, "bob", port, (), user_known_hosts=(file,))
    file.write_text(f"{there.listed_name} {key.get_name()} {key.get_base64()}\n")
    return there


@contextlib.contextmanager
def silent() -> Iterator[tuple[int, tuple[str, int]]]:
    """A port whose queue is full: it never answers, as behind a firewall."""
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            caller = opened.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(server.getsockname())
        yield socket.AF_INET, server.getsockname()


@pytest.mark.parametrize(
    ("host", "port", "what"),
    [
        ("127.0.0.1", 1, "it refuses connections on port 1"),
        ("nobody.invalid", 22, "its name cannot be resolved"),
        ("255.255.255.255", 22, "there is no route to it"),
    ],
)
def test_connect_explains_unreachable_host(host: str, port: int, what: str, tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=what) as failed:
        SshTransport(SshConfig()).connect_to(known(tmp_path, host, port), PATIENCE)
    assert (host in failed.value.fix) == ("resolved" in what)


def test_connect_times_out_on_silent_host(tmp_path: Path) -> None:
    with silent() as (_, (host, port)), pytest.raises(NodeError, match="it does not answer on"):
        SshTransport(SshConfig()).connect_to(known(tmp_path, host, port), 0.3)


@pytest.mark.parametrize(
    ("error", "what", "fix"),
    [
        (paramiko.ChannelException(1, "Administratively prohibited"),
         "the jump host b may not connect us to gpu01:22", "AllowTcpForwarding yes"),
        (paramiko.ChannelException(2, "Connect failed"),
         "the jump host b cannot reach gpu01:22 (Connect failed)", "ssh -p 22 gpu01"),
        (EOFError("gone"), "the jump host b cannot reach gpu01:22 (gone)", "ssh -p 22 gpu01"),
    ],
)  # fmt: skip
def test_no_way_on_explains_failing_jump_host(error: Exception, what: str, fix: str) -> None:
    told = no_way_on(Destination(host="gpu01", user="bob", port=22, keys=(), jump="a,b"), error)
    assert (told.what, fix in told.fix) == (what, True)


@pytest.mark.parametrize(("drops", "said"), [(1, "closes every connection"), (0, "hangs in the")])
def test_connect_reports_dropped_tries_over_last_time_out(
    drops: int, said: str, tmp_path: Path
) -> None:
    """A server with no room (MaxStartups) hangs up at once; a last try may have no time left."""
    (tmp_path / "config").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as held:

        def answer() -> None:
            for number in range(drops + 1):
                connection, _ = server.accept()
                held.callback(connection.close)
                if number < drops:
                    connection.sendall(b"Exceeded MaxStartups\r\n")
                    connection.close()

        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        there = known(tmp_path, "127.0.0.1", server.getsockname()[1])
        with pytest.raises(NodeError, match=said):
            SshTransport(SshConfig(tmp_path / "config")).connect_to(there, 2.0)
        answering.join()


@pytest.mark.cluster
def test_cut_link_ends_large_send(
    netns_cluster: Callable[..., NetnsCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would go on for a quarter of an hour, and paramiko with it."""
    cluster = netns_cluster(1)
    monkeypatch.setattr(fabric_login, "LINK_SECONDS", 2.0)
    config = SshConfig(cluster.ssh_config)
    node = Node(cluster.addresses[0])
    # Ssh adds the new host to known_hosts.
    first = SshTransport(config).connect(node)
    assert first.run("true", 10.0).recv_exit_status() == 0
    connection = SshTransport(config).connect(node)
    assert isinstance(connection, fabric_login.FabricConnection)
    channel = connection.run("cat", 10.0)
    channel.sendall(b"there")
    assert channel.recv(5) == b"there"
    cluster.cut(0)
    channel.settimeout(600.0)
    with pytest.raises(OSError, match=r"closed|hung up"):
        while True:
            channel.sendall(bytes(1 << 16))
