"""Code goes from host to host where there are many; firewalls and lost hosts are passed by."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.common.errors import NodeError
from orchestrator.config.launch import LaunchArguments, Where
from orchestrator.head.connect.reach import Reached
from orchestrator.head.connect.ssh import SshTransport
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.nodes.node_list import choose, read_nodes
from orchestrator.head.screen import output
from orchestrator.head.screen.progress import Progress
from orchestrator.head.start.nodes import try_all
from orchestrator.head.start.request import resolve
from orchestrator.head.transfer import push as pushing
from orchestrator.head.transfer import spread
from orchestrator.head.transfer.code.listing import Rules
from orchestrator.head.transfer.code.scan import Limits, Scan
from orchestrator.head.transfer.peer import Moved
from orchestrator.head.transfer.spread import PassingOn
from tests.clusters.netns import NetnsCluster
from tests.clusters.require import require_namespaces
from tests.head.transfer.test_send import send_tree
from tests.launching import Head

pytestmark = pytest.mark.slow

HOSTS = 7  # the head sends to two, these to four, and one of those to the last
SIZE = 12_000_000


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetnsCluster]:
    require_namespaces()
    with NetnsCluster(HOSTS, tmp_path_factory.mktemp("fanout")) as cluster:
        yield cluster


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree that no host has yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    for number in range(20):
        (tmp_path / "work" / f"{number}").write_bytes(os.urandom(SIZE // 20))
    return tmp_path / "work"


def left_the_head(hosts: NetnsCluster) -> int:
    counter = Path(f"/sys/class/net/orc{hosts.addresses[0].split('.')[2]}/statistics/tx_bytes")
    return int(counter.read_text())


@contextmanager
def reached(hosts: NetnsCluster) -> Iterator[tuple[Reached, ...]]:
    where = Where(nodes=hosts.node_list, ssh_config=hosts.ssh_config)
    nodes = try_all(resolve(LaunchArguments(program=("true",), where=where)))
    assert not nodes.lost
    try:
        yield nodes.reached
    finally:
        for node in nodes.reached:
            node.channel.connection.close()


@contextmanager
def walled(hosts: NetnsCluster, host: int) -> Iterator[None]:
    """A firewall before one host lets SSH in, and nothing else."""
    for words in (
        "add table inet wall",
        "add chain inet wall in { type filter hook input priority 0 ; }",
        "add rule inet wall in tcp dport != 22 ct state new drop",
    ):
        hosts.exec(host, ["nft", words])
    yield
    hosts.exec(host, ["nft", "delete table inet wall"])


def test_the_code_of_a_launch(hosts: NetnsCluster, work: Path) -> None:
    """Two copies leave the head. The hook, which runs in the code, ends the launch: it has come."""
    head = Head(hosts, work)
    head.script("it.py", "")
    head.script("hook.sh", 'echo "it has $(ls | wc -l)" >&2\nreturn 3\n')
    before = left_the_head(hosts)
    words = ["--sync", "always", "--nproc", "1", "--set", "sync.fanout=3", "--hook", "hook.sh"]
    command = head.launch(*words, "it.py")
    assert command.finish() == 3
    sent = left_the_head(hosts) - before
    assert 2 * SIZE < sent < 2 * SIZE + HOSTS * 500_000, sent  # our program goes to each
    assert "sent from here" not in command.text
    assert command.text.count("it has 22") == HOSTS, command.text
    assert not list(work.glob(".orchestrator*"))


def test_a_firewall_and_a_host_that_is_lost(
    hosts: NetnsCluster, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hosts behind them get it from the head within seconds."""
    monkeypatch.setattr(spread, "ANSWER_SECONDS", 8.0)
    tree = Scan(os.fsencode(work), Rules(), Limits()).tree()
    said: list[str] = []
    for host in range(2):
        hosts.slow(host, "100mbit")
    try:
        with reached(hosts) as nodes, walled(hosts, 0):
            began = time.monotonic()
            results = send_tree(nodes, tree, lambda _: hosts.cut(2), PassingOn(3, 0), said.append)
            took = time.monotonic() - began
    finally:
        hosts.restore(2)
        for host in range(2):
            hosts.unslow(host)
    assert isinstance(results.pop(2), NodeError)
    assert results == [(tree.files, tree.size)] * (HOSTS - 1)
    assert took < 40, took
    text = "\n".join(said)
    assert len(said) == 2, text
    assert "cannot take files from" in said[0]
    assert hosts.addresses[3] in text  # behind the first, which has a firewall
    assert hosts.addresses[6] in text  # behind the lost one
    assert not {hosts.addresses[at] for at in (0, 1, 4, 5)} & {
        *said[1].split(" to ")[1].split(", ")
    }


def push(hosts: NetnsCluster, work: Path, into: str = "kept") -> tuple[list[Moved], list[str]]:
    targets = choose(read_nodes(hosts.node_list), [])
    transport = SshTransport(SshConfig(hosts.ssh_config), timeout=10.0)
    cargo, said = pushing.load(work, f"~/{into}/work"), list[str]()
    with output.heard_by(said.append):
        done = pushing.push(
            transport,
            targets,
            cargo,
            Progress("sending", 0),
            dry_run=False,
            passing_on=PassingOn(3, 0),
        )
    return done, said


def test_a_push(hosts: NetnsCluster, work: Path) -> None:
    """Files, their modes and their times; two copies leave the head."""
    (work / "in a").mkdir()
    (work / "in a" / "program").write_text("#!/bin/sh\n")
    (work / "in a" / "program").chmod(0o755)
    (work / "empty").touch()
    before = left_the_head(hosts)
    done, said = push(hosts, work)
    sent = left_the_head(hosts) - before
    assert [(each.error, each.failed) for each in done] == [(None, {})] * HOSTS
    assert {(len(each.files), each.kept, each.size) for each in done} == {(22, 0, SIZE + 10)}
    assert 2 * SIZE < sent < 2 * SIZE + HOSTS * 500_000, sent
    assert said == []
    for host in range(HOSTS):
        for path in (path for path in work.rglob("*") if path.is_file()):
            copy = hosts.home(host) / "kept/work" / path.relative_to(work)
            assert copy.read_bytes() == path.read_bytes()
            assert copy.stat().st_mtime_ns == path.stat().st_mtime_ns
            assert copy.stat().st_mode == path.stat().st_mode
    (work / "0").write_bytes(os.urandom(SIZE // 20))
    again, _ = push(hosts, work)
    assert {(tuple(each.files), each.kept, each.size) for each in again} == {
        (("0",), 21, SIZE // 20)
    }
