"""A tree goes to nodes over the channel that is open: servers of ours, here in their own homes."""

from __future__ import annotations

import hashlib
import os
import resource
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.common.errors import CheckFailed, NodeError
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import Reached, open_channel
from orchestrator.head.connect.subprocess_transport import LocalTransport
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.transfer import batches
from orchestrator.head.transfer.code import shared
from orchestrator.head.transfer.code.listing import Rules
from orchestrator.head.transfer.code.scan import Limits, Scan, Tree
from orchestrator.head.transfer.fanout import Changed, Sent, send_tree
from orchestrator.protocol.requests.machine import Probe, ProbeTarget
from orchestrator.protocol.requests.transfer import CheckedOut, CheckOut
from tests.head.plan.probed import facts

FILES = {"a.py": b"a = 1\n", "empty": b"", "large": os.urandom(300_000) + bytes(700_000)}
FILES |= {f"many/{number}": b"%d" % number for number in range(300)}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(batches, "BATCH", 100_000)
    for name, content in FILES.items():
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "work"


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Reached]]:
    reached = []
    for number in range(2):
        monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / f"home{number}"))
        reached.append(reach(f"node{number}"))
    yield reached
    for node in reached:
        node.channel.close()


def reach(name: str) -> Reached:
    transport = LocalTransport()
    connection = transport.connect(transport.config.of_node(Node(name)))
    return Reached(Node(name), facts(), open_channel(connection, Node(name), 30.0))


def scan(directory: Path) -> Tree:
    return Scan(os.fsencode(directory), Rules(), Limits()).tree()


def check_out(channel: NodeChannel, tree: Tree, name: str = "x-0") -> CheckedOut:
    target = ProbeTarget(kind="auto", name="a.py")
    request = CheckOut(
        tree=tree.digest, snapshot=name, title="work", beside="/nowhere", target=target
    )
    return channel.ask(request, 30.0)


def test_each_node_gets_what_it_lacks(work: Path, nodes: list[Reached]) -> None:
    tree = scan(work)
    seen: list[int] = []
    lock = threading.Lock()

    def add(count: int) -> None:
        with lock:
            seen.append(count)

    assert send_tree(nodes[:1], tree) == [Sent(tree.files, tree.size)]
    assert send_tree(nodes, tree, add) == [Sent(0, 0), Sent(tree.files, tree.size)]
    assert sum(seen) == tree.size
    (work / "a.py").write_bytes(b"a = 2\n")
    edited = scan(work)
    assert send_tree(nodes, edited) == [Sent(1, 6)] * 2
    for node in nodes:
        checked = check_out(node.channel, edited)
        assert (checked.tree, checked.differ) == (edited.digest, ())
        for name, content in {**FILES, "a.py": b"a = 2\n"}.items():
            assert (Path(checked.workdir) / name).read_bytes() == content


def test_what_arrived_before_a_cut_stays(
    work: Path, nodes: list[Reached], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tree = scan(work)
    real = batches.Batches.get

    def cut(self: batches.Batches, number: int) -> batches.Batch | None:
        if number == 5:
            nodes[0].channel.close()
        return real(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(batches.Batches, "get", cut)
        (broken,) = send_tree(nodes[:1], tree)
    assert isinstance(broken, NodeError)
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home0"))
    again = reach("node0")
    (sent,) = send_tree([again], tree)
    assert isinstance(sent, Sent)
    assert 0 < sent.size < tree.size
    assert check_out(again.channel, tree).tree == tree.digest
    again.channel.close()


@pytest.mark.parametrize("how", ["edited", "shorter", "gone"])
def test_an_edit_on_the_way_is_seen(work: Path, nodes: list[Reached], how: str) -> None:
    tree = scan(work)
    if how == "gone":
        (work / "many/7").unlink()
    else:
        (work / "many/7").write_bytes(b"x" if how == "edited" else b"")
    with pytest.raises(Changed, match="many/7"):
        send_tree(nodes, tree)
    new = scan(work)
    assert all(isinstance(sent, Sent) for sent in send_tree(nodes, new))
    assert check_out(nodes[0].channel, new).tree == new.digest


def test_a_node_that_lacks_what_there_is_not_is_refused(work: Path, nodes: list[Reached]) -> None:
    tree = scan(work)
    small = Tree(tree.directory, tree.entries[:1], tree.listing, tree.digest)
    (refused,) = send_tree(nodes[:1], small)
    assert "it lacks files that the tree does not have" in str(refused)


def test_a_marker_is_on_shared_disks_alone(work: Path, nodes: list[Reached]) -> None:
    question = Probe(
        cwd=str(work), workdir=None, peers=(), target=ProbeTarget(kind="engine", name="x")
    )
    with shared.marker(work) as path:
        assert nodes[0].channel.ask(question.replace(marker=path), 30.0).marker_seen
        other = str(work / "elsewhere" / Path(path).name)
        assert not nodes[0].channel.ask(question.replace(marker=other), 30.0).marker_seen
        assert scan(work).files == len(FILES)
    assert not Path(path).exists()
    assert not nodes[0].channel.ask(question, 30.0).marker_seen
    with shared.marker(work / "missing") as path:
        assert path == ""


def test_a_disk_that_lags_behind_stops_a_launch(
    work: Path, nodes: list[Reached], tmp_path: Path
) -> None:
    """The node sees an older file: here a copy, there the cache of a network disk."""
    states = {b"a.py": (work / "a.py").stat(), b"large": (work / "large").stat()}
    shared.check_same(nodes, os.fsencode(work), states)
    (work / "a.py").write_bytes(b"a = 3\n")
    newer = {b"a.py": (work / "a.py").stat()}
    real = NodeChannel.ask

    def stale(self: NodeChannel, request: object, timeout: float) -> object:
        answer = real(self, request, timeout)  # type: ignore[type-var]
        old = hashlib.sha256(FILES["a.py"]).hexdigest()
        return answer.replace(differ={"a.py": old}) if self is nodes[1].channel else answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NodeChannel, "ask", stale)
        with pytest.raises(CheckFailed, match=r"node1: a\.py"):
            shared.check_same(nodes, os.fsencode(work), newer)
        os.utime(work / "a.py", (1, 1))  # it changes meanwhile: nobody can say
        shared.check_same(nodes, os.fsencode(work), newer)


def test_a_temporary_directory_without_room_is_an_error_in_words(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each node: the batch that had no room is none that another one may pass over."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tree = scan(work)
    own = batches.Batches(tree, range(len(tree.entries)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, before[1]))
        for _ in range(2):
            with pytest.raises(CheckFailed, match=rf"wait in {tmp_path}: File too") as error:
                for number in range(len(FILES)):
                    own.get(number)
        assert "TMPDIR" in error.value.fix
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    own.close()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(CheckFailed, match="none: No such file"):
        batches.Batches(tree, range(3))
