"""fabric over our connections: its own run, put, get and Group, and our verification."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from orchestrator import Cluster
from orchestrator.common.errors import NodeError
from tests.conftest import Cluster as Hosts


def test_run_put_get_on_two_nodes(two_nodes: Hosts, tmp_path: Path) -> None:
    cluster = Cluster(two_nodes.node_list, ssh_config=two_nodes.ssh_config)
    with cluster.fabric() as group:
        results = group.run("echo out; echo error >&2", hide=True, in_stream=False)
        assert [result.stdout for result in results.values()] == ["out\n"] * 2
        assert [result.stderr for result in results.values()] == ["error\n"] * 2
        for number, connection in enumerate(group):
            connection.put(io.BytesIO(b"sent %d" % number), f"{tmp_path}/sent{number}")
            connection.get(f"{tmp_path}/sent{number}", f"{tmp_path}/back{number}")
            assert (tmp_path / f"back{number}").read_bytes() == b"sent %d" % number
        assert group[0].sudo is not None and group[0].is_connected
    assert not any(connection.is_connected for connection in group)


def test_a_changed_host_key_is_refused(two_nodes: Hosts) -> None:
    from fabric.exceptions import GroupException

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
    assert isinstance(error, NodeError) and "host key has changed" in error.what
