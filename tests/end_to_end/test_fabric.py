"""Cluster.fabric(): plain connections of fabric's that log in and verify as ssh_config says."""

import io
from pathlib import Path

import fabric
import paramiko
import pytest
from fabric.exceptions import GroupException

from orchestrator import Cluster
from orchestrator.common.errors import UsageError
from tests.conftest import Cluster as Hosts


def test_fabric_group_runs_on_two_nodes(two_nodes: Hosts, tmp_path: Path) -> None:
    cluster = Cluster(two_nodes.node_list, ssh_config=two_nodes.ssh_config)
    with cluster.fabric() as group:
        assert [type(connection) for connection in group] == [fabric.Connection] * 2
        results = group.run("echo out; echo error >&2", hide=True, in_stream=False)
        assert [result.stdout for result in results.values()] == ["out\n"] * 2
        assert [result.stderr for result in results.values()] == ["error\n"] * 2
        for number, connection in enumerate(group):
            connection.put(io.BytesIO(b"sent %d" % number), f"{tmp_path}/sent{number}")
            connection.get(f"{tmp_path}/sent{number}", f"{tmp_path}/back{number}")
            assert (tmp_path / f"back{number}").read_bytes() == b"sent %d" % number
        assert group[0].sudo is not None and group[0].is_connected
    assert not any(connection.is_connected for connection in group)


def test_fabric_refuses_changed_host_key(two_nodes: Hosts) -> None:
    two_nodes.change_host_key(1)
    try:
        with pytest.raises(GroupException) as raised:
            Cluster(two_nodes.node_list, ssh_config=two_nodes.ssh_config).fabric().run(
                "echo here", hide=True, in_stream=False
            )
    finally:
        two_nodes.restore_host_key(1)
    assert [result.stdout for result in raised.value.result.succeeded.values()] == ["here\n"]
    (error,) = raised.value.result.failed.values()
    assert isinstance(error, paramiko.BadHostKeyException)


def test_fabric_works_behind_jump_host(two_nodes: Hosts, tmp_path: Path) -> None:
    first, second = two_nodes.addresses
    config = tmp_path / "config"
    config.write_text(f"Host {second}\n ProxyJump {first}\n{two_nodes.ssh_config.read_text()}")
    nodes = two_nodes.write_list([second])
    with Cluster(nodes, ssh_config=config).fabric() as group:
        (connection,) = group
        assert type(connection) is type(connection.gateway) is fabric.Connection
        (result,) = group.run("echo $SSH_CONNECTION", hide=True, in_stream=False).values()
        assert result.stdout.split()[0] == first and connection.gateway.host == first


def test_fabric_refuses_host_that_needs_ssh(two_nodes: Hosts, tmp_path: Path) -> None:
    config = tmp_path / "config"
    proxy = "bash -c 'exec 3<>/dev/tcp/%h/%p; cat <&3 & exec cat >&3'"
    config.write_text(f"ProxyCommand {proxy}\n{two_nodes.ssh_config.read_text()}")
    with pytest.raises(UsageError, match="proxycommand is set in your ssh_config"):
        Cluster(two_nodes.node_list, ssh_config=config).fabric()
