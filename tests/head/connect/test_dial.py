"""The way to a host: its name, its addresses, its jump hosts, and servers with no room."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest

from orchestrator.common.errors import NodeError
from orchestrator.head.connect import fleet, ssh
from orchestrator.head.connect.fabric_login import no_way_on
from orchestrator.head.connect.ssh import SshTransport, dial, first_to_answer
from orchestrator.head.connect.ssh_config import Destination, SshConfig
from orchestrator.head.nodes.node_list import Node
from orchestrator.local_cluster.cluster import free_port
from tests.clusters.netns import NetnsCluster

PATIENCE = 30.0


@contextlib.contextmanager
def silent() -> Iterator[tuple[int, tuple[str, int]]]:
    """A port whose queue is full: it answers no call, as behind a firewall."""
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            caller = opened.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(server.getsockname())
        yield socket.AF_INET, server.getsockname()


@contextlib.contextmanager
def answering() -> Iterator[tuple[int, tuple[str, int]]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield socket.AF_INET, server.getsockname()


def closed() -> tuple[int, tuple[str, int]]:
    return socket.AF_INET, ("127.0.0.1", free_port(["127.0.0.1"]))


def test_an_address_that_drops_everything_leaves_time_for_others() -> None:
    with silent() as dead, answering() as alive:
        addresses = [dead, closed(), alive]
        with first_to_answer(addresses, "", time.monotonic() + PATIENCE) as sock:
            assert sock.getpeername() == alive[1]
            assert sock.gettimeout()


def test_the_source_is_the_one_that_was_asked_for() -> None:
    deadline = time.monotonic() + PATIENCE
    with answering() as alive, first_to_answer([alive], "127.0.0.9", deadline) as sock:
        assert sock.getsockname()[0] == "127.0.0.9"


def test_no_address_answers() -> None:
    with pytest.raises(ConnectionRefusedError):
        first_to_answer([closed(), closed()], "", time.monotonic() + PATIENCE)
    with silent() as dead, pytest.raises(TimeoutError):
        first_to_answer([closed(), dead], "", time.monotonic() + 0.6)
    nowhere = (socket.AF_INET6, ("100::1", 22, 0, 0))
    with pytest.raises(OSError) as failed:
        first_to_answer([nowhere], "127.0.0.1", time.monotonic() + PATIENCE)
    assert not isinstance(failed.value, TimeoutError), "it is known at once"


@pytest.mark.parametrize(
    ("host", "port", "what"),
    [
        ("127.0.0.1", 1, "it refuses connections on port 1"),
        ("unknown.invalid", 22, "its name cannot be resolved"),
        ("255.255.255.255", 22, "there is no route to it"),
    ],
)
def test_what_keeps_a_call_from_a_host_is_told(host: str, port: int, what: str) -> None:
    with pytest.raises(NodeError, match=what) as failed:
        dial(Destination(host, "bob", port, ()), time.monotonic() + PATIENCE)
    assert (host in failed.value.fix) == ("resolved" in what)


def test_a_host_that_is_silent_is_told() -> None:
    with silent() as (_, (host, port)), pytest.raises(NodeError, match="it does not answer on"):
        dial(Destination(host, "bob", port, ()), time.monotonic() + 0.3)


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
def test_a_jump_host_that_leads_no_further(error: Exception, what: str, fix: str) -> None:
    told = no_way_on(Destination(host="gpu01", user="bob", port=22, keys=(), jump="a,b"), error)
    assert (told.what, fix in told.fix) == (what, True)


@pytest.mark.parametrize(("drops", "said"), [(1, "closes every connection"), (0, "hangs in the")])
def test_the_last_of_many_tries_does_not_hide_that_the_others_were_dropped(
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
        there = Destination("127.0.0.1", "bob", server.getsockname()[1], ())
        with pytest.raises(NodeError, match=said):
            SshTransport(SshConfig(tmp_path / "config"), timeout=2.0).connect(there)
        answering.join()


def test_a_link_that_is_cut_while_much_is_sent(
    netns_cluster: Callable[..., NetnsCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would go on for a quarter of an hour, and paramiko with it."""
    cluster = netns_cluster(1)
    monkeypatch.setattr(ssh, "LINK_SECONDS", 2.0)
    config = SshConfig(cluster.ssh_config)
    connection = SshTransport(config).connect(config.of_node(Node(cluster.addresses[0])))
    channel = connection.run("cat", 10.0)
    channel.sendall(b"there")
    assert channel.recv(5) == b"there"
    cluster.cut(0)
    channel.settimeout(600.0)
    with pytest.raises(OSError, match=r"closed|hung up"):
        while True:
            channel.sendall(bytes(1 << 16))


def test_names_that_nothing_resolves_cost_one_time_limit_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name server that is silent holds up no other name, and no address."""
    silent = threading.Event()

    def ask(host: str, port: int, *_: object) -> list[Any]:
        if host.startswith("unknown"):
            silent.wait()
        return [(socket.AF_INET, 0, 0, "", (host, port))]

    def resolve(host: str) -> list[tuple[int, Any]]:
        there = Destination(host, "bob", 22, ())
        return ssh.resolved(there, time.monotonic() + (0.3 if "unknown" in host else 30))

    monkeypatch.setattr(ssh.socket, "getaddrinfo", ask)
    hosts = [f"unknown{n}" for n in range(200)] + ["gpu1", "10.0.0.1"]
    found = fleet.everywhere(hosts, resolve)  # it would never end if one held up another
    silent.set()
    assert [pair[1] for [pair] in found[-2:]] == [("gpu1", 22), ("10.0.0.1", 22)]  # type: ignore[misc]
    assert {str(error).partition("\n")[0] for error in found[:-2]} == {
        "its name cannot be resolved: no name server answers"
    }
