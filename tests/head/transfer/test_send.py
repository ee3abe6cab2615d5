"""A tree goes to nodes over the channel that is open: servers of ours, here in their own homes."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import Reached, open_channel
from orchestrator.head.connect.subprocess_transport import LocalTransport
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.start.nodes import marker_file
from orchestrator.head.transfer import send
from orchestrator.head.transfer.listing import Rules
from orchestrator.head.transfer.scan import Scan
from orchestrator.head.transfer.send import Batch, Outbox, first_failed_path
from orchestrator.head.transfer.tree import Moved, Tree
from orchestrator.protocol.manifest import FILE, ManifestEntry
from orchestrator.protocol.requests.machine import Probe
from orchestrator.protocol.requests.transfer import STORE, CheckedOut, CheckOut, RemoteDir
from orchestrator.protocol.spec import Target
from tests.head.plan.probed import facts

pytestmark = pytest.mark.slow

FILES = {"a.py": b"a = 1\n", "empty": b"", "large": os.urandom(300_000) + bytes(700_000)}
FILES |= {f"many/{number}": b"%d" % number for number in range(300)}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(send, "BATCH_BYTES", 100_000)
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
    connection = transport.connect(Node(name))
    return Reached(Node(name), facts(), open_channel(connection, Node(name), 30.0))


def scan(directory: Path) -> Tree:
    return Scan(os.fsencode(directory), Rules()).tree()


def check_out(channel: NodeChannel, tree: Tree, name: str = "x-0") -> CheckedOut:
    target = Target(kind="auto", name="a.py")
    request = CheckOut(
        tree=tree.digest, snapshot=name, title="work", beside="/nowhere", target=target
    )
    return channel.ask(request, 30.0)


def send_tree(
    nodes: Sequence[Reached],
    tree: Tree,
    seen: Callable[[int], None] = lambda _: None,
) -> list[tuple[int, int] | OrchestratorError]:
    """Bring a tree to the stores of nodes; return how many files and bytes each lacked."""
    results = send_to_stores(nodes, tree, seen)
    assert first_failed_path(results) == ""
    return [(len(r.files), r.size) if isinstance(r, Moved) else r for r in results]


def send_to_stores(
    nodes: Sequence[Reached], tree: Tree, seen: Callable[[int], None] = lambda _: None
) -> list[Moved | OrchestratorError]:
    places = [RemoteDir(kind=STORE)] * len(nodes)
    return send.send_to_all([node.channel for node in nodes], places, tree, seen)


def test_send_tree_sends_missing_files_alone(work: Path, nodes: list[Reached]) -> None:
    tree = scan(work)
    seen: list[int] = []
    lock = threading.Lock()

    def add(count: int) -> None:
        with lock:
            seen.append(count)

    assert send_tree(nodes[:1], tree) == [(tree.files, tree.size)]
    assert send_tree(nodes, tree, add) == [(0, 0), (tree.files, tree.size)]
    assert sum(seen) == 2 * tree.size, "what is there counts as well"
    (work / "a.py").write_bytes(b"a = 2\n")
    edited = scan(work)
    assert send_tree(nodes, edited) == [(1, 6)] * 2
    for node in nodes:
        checked = check_out(node.channel, edited)
        for name, content in {**FILES, "a.py": b"a = 2\n"}.items():
            assert (Path(checked.workdir) / name).read_bytes() == content


def test_send_tree_continues_after_cut(
    work: Path, nodes: list[Reached], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tree = scan(work)
    real = Outbox.batches

    def cut(self: Outbox, numbers: Sequence[int]) -> Iterator[Batch]:
        for number, batch in enumerate(real(self, numbers)):
            if number == 5:
                nodes[0].channel.close()
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(Outbox, "batches", cut)
        (broken,) = send_tree(nodes[:1], tree)
    assert isinstance(broken, NodeError)
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home0"))
    again = reach("node0")
    (sent,) = send_tree([again], tree)
    assert isinstance(sent, tuple)
    assert 0 < sent[1] < tree.size
    assert check_out(again.channel, tree).workdir
    again.channel.close()


@pytest.mark.parametrize("how", ["edited", "shorter", "gone"])
def test_edit_during_send_is_detected(work: Path, nodes: list[Reached], how: str) -> None:
    tree = scan(work)
    if how == "gone":
        (work / "many/7").unlink()
    else:
        (work / "many/7").write_bytes(b"x" if how == "edited" else b"")
    results = send_to_stores(nodes, tree)
    assert first_failed_path(results) == "many/7"
    new = scan(work)
    changed = {"edited": (1, 1), "shorter": (0, 0), "gone": (0, 0)}  # an empty one has come
    assert send_tree(nodes, new) == [changed[how]] * 2
    assert check_out(nodes[0].channel, new).workdir


def test_request_for_unknown_files_is_refused(work: Path, nodes: list[Reached]) -> None:
    tree = scan(work)
    small = Tree(tree.directory, tree.entries[:1], tree.listing, tree.digest)
    (refused,) = send_to_stores(nodes[:1], small)
    assert "it lacks files that the list does not have" in str(refused)


# -- batches ----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 30), max_size=8))
def test_cut_places_every_byte_in_one_part(sizes: list[int]) -> None:
    entries = [ManifestEntry(b"%d" % at, FILE, 0o644, size, b"") for at, size in enumerate(sizes)]
    batches = list(send.cut_batches(entries, range(len(sizes)), 10))
    assert all(sum(part.size for part in batch) <= 10 for batch in batches)
    parts = [part for batch in batches for part in batch]
    assert parts == sorted(parts)
    for at, size in enumerate(sizes):
        of_it = [part for part in parts if part.number == at]
        assert sum(part.size for part in of_it) == size and of_it[0].offset == 0
        assert len([part for part in of_it if not part.size]) <= (not size)


def test_late_node_gets_same_batches_in_bounded_memory(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send, "KEPT", 2)
    tree = scan(work)
    outbox = Outbox(tree, tree.read)
    first = list(outbox.batches(range(tree.files)))
    assert len(first) > 5
    assert outbox.begin.cache_info().currsize <= 2
    assert list(outbox.batches(range(tree.files))) == first
    outbox.pool.shutdown()


def test_nodes_lacking_same_files_share_batches(work: Path) -> None:
    tree = scan(work)
    outbox = Outbox(tree, tree.read)
    numbers = range(tree.files)
    pairs = list(zip(outbox.batches(numbers), outbox.batches(numbers), strict=True))
    assert all(one is other for one, other in pairs)
    outbox.pool.shutdown()


# -- shared disks -----------------------------------------------------------------------------


def test_marker_is_seen_on_shared_disk_alone(work: Path, nodes: list[Reached]) -> None:
    question = Probe(cwd=str(work), workdir=None, peers=(), target=Target(kind="engine", name="x"))
    with marker_file(work) as path:
        assert nodes[0].channel.ask(question.replace(marker=path), 30.0).sees_directory
        other = str(work / "elsewhere" / Path(path).name)
        assert not nodes[0].channel.ask(question.replace(marker=other), 30.0).sees_directory
        assert scan(work).files == len(FILES)
    assert not Path(path).exists()
    assert not nodes[0].channel.ask(question, 30.0).sees_directory
    with marker_file(work / "missing") as path:
        assert path == ""
