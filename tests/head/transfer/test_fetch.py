"""Files from a node: whole or not at all, continued where they broke off, and never elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.folder import Folder
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import open_channel
from orchestrator.head.connect.subprocess_transport import LocalTransport
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.transfer import fetch
from orchestrator.head.transfer.fetch import Fetch
from orchestrator.head.transfer.tree import Moved
from orchestrator.protocol.requests.request import Ping
from orchestrator.protocol.requests.transfer import ListPath, OutputFile, OutputFiles
from tests.head.transfer.nodes import tree

Bring = Callable[..., Moved]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeChannel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCHESTRATOR_HOME", str(tmp_path_factory.mktemp("home") / "state"))
        connection = LocalTransport().connect(Node("here"))
        yield open_channel(connection, Node("here", python=sys.executable), 60)
        connection.close()


def listing(node: NodeChannel, path: Path) -> OutputFiles:
    return node.ask(ListPath(path=path.name, directory=str(path.parent)), 60)


@pytest.fixture
def bring(node: NodeChannel, tmp_path: Path) -> Bring:
    """Fetch what is in tmp_path/node/here into tmp_path/here."""
    (tmp_path / "node/here").mkdir(parents=True)

    def bring(*files: OutputFile, **options: Any) -> Moved:
        known = listing(node, tmp_path / "node/here")
        folder = Folder(tmp_path, private=False)
        replace = options.pop("replace", True)
        options["replace"] = lambda _: replace
        result = Fetch(node, known.place, folder, label="x", **options).go(files or known.files)
        result.left_out += known.left_out
        return result

    return bring


def test_fetch_copies_tree_with_odd_names(bring: Bring, tmp_path: Path) -> None:
    there = tmp_path / "node/here"
    (there / "empty").mkdir()
    (there / "a b" / "c").mkdir(parents=True)
    (there / "a b" / "c" / "it's\nodd").write_bytes(os.urandom(3 << 19))
    (there / os.fsdecode(b"\xff\xfe")).touch()
    (there / ".hidden").write_text("x")
    (there / "program").write_text("x")
    (there / "program").chmod(0o4755)
    (there / "link").symlink_to("a b/c/nothing")
    (there / "a b" / "out").symlink_to("../../../x")
    os.mkfifo(there / "pipe")
    result = bring()
    assert result.failed == {} and len(result.files) == 5
    assert [word.partition(" (")[0] for word in result.left_out] == ["here/a b/out", "here/pipe"]
    expected = tree(there)
    del expected["a b/out"], expected["pipe"]
    expected["program"] = (b"x", 0o755)
    assert tree(tmp_path / "here") == expected
    again = bring()
    assert (again.files, again.size, again.failed) == ([], 0, {})
    assert again.kept == 5


def test_fetch_continues_grown_and_replaces_changed_file(bring: Bring, tmp_path: Path) -> None:
    grows, changes = tmp_path / "node/here/grows", tmp_path / "node/here/changes"
    grows.write_bytes(b"a" * 1000)
    changes.write_bytes(b"b" * 1000)
    bring()
    grows.write_bytes(b"a" * 1500)
    changes.write_bytes(b"c" * 1000)
    os.utime(changes, (1, 1))
    result = bring()
    assert result.size == 2500
    assert (tmp_path / "here/grows").read_bytes() == b"a" * 1500
    assert (tmp_path / "here/changes").read_bytes() == b"c" * 1000
    (tmp_path / "here/grows").write_bytes(b"mine")
    result = bring(replace=False)
    assert result.failed == {"here/grows": "another file has this name here"}
    assert (tmp_path / "here/grows").read_bytes() == b"mine"


@pytest.mark.parametrize("text", ["of a later attempt", "LATER"])
def test_later_attempt_replaces_files_of_earlier_one(
    bring: Bring, tmp_path: Path, text: str
) -> None:
    there, here = tmp_path / "node/here/last.pt", tmp_path / "here/last.pt"
    there.write_text("FIRST")
    bring(replace=False)
    over = time.time() + 1
    there.write_text(text)
    for came_before, changed in ((0.0, over + 2), (over - 60, over + 2), (over, over - 1)):
        os.utime(there, (changed, changed))
        result = bring(replace=False, since=(came_before, over))
        assert result.failed == {"here/last.pt": "another file has this name here"}
    os.utime(there, (over + 2, over + 2))
    assert not bring(replace=False, since=(over, over)).failed and here.read_text() == text


def test_files_of_equal_size_and_time_are_compared_by_content(bring: Bring, tmp_path: Path) -> None:
    """At the end of a job contents are compared: files of two nodes may have one size and time."""
    (tmp_path / "here").mkdir()
    for path, text in ((tmp_path / "here/a.csv", "1,2"), (tmp_path / "node/here/a.csv", "3,4")):
        path.write_text(text)
        os.utime(path, (1, 1))
    result = bring(replace=False, since=(0.0, 0.0))
    assert result.failed == {"here/a.csv": "another file has this name here"}


@pytest.mark.parametrize(("other", "failed"), [("b", True), ("a", False)])
def test_file_given_by_other_node_is_kept(
    bring: Bring, tmp_path: Path, other: str, failed: bool
) -> None:
    (tmp_path / "node/here/file").write_text("a")
    result = bring(replace=False, progress=lambda _: (tmp_path / "here/file").write_text(other))
    why = "another file has this name here"
    assert result.failed == ({"here/file": why} if failed else {})
    assert (result.files, result.kept) == ([], 0 if failed else 1)
    assert (tmp_path / "here/file").read_text() == other
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["file"]


def test_file_that_shrinks_is_not_fetched(node: NodeChannel, bring: Bring, tmp_path: Path) -> None:
    (tmp_path / "node/here/file").write_bytes(b"x" * 1000)
    known = listing(node, tmp_path / "node/here")
    (tmp_path / "node/here/file").write_bytes(b"x" * 10)
    result = bring(*known.files)
    assert "changed while it was read" in result.failed["here/file"]
    assert not (tmp_path / "here/file").exists()


def test_fetch_never_leaves_directory(bring: Bring, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "node/here/a").mkdir()
    (tmp_path / "node/here/a/file").write_text("x")
    (tmp_path / "node/here/b").write_text("x")
    (tmp_path / "here").mkdir()
    (tmp_path / "here/a").symlink_to(outside)
    (tmp_path / "here/b").symlink_to(outside / "b")
    result = bring()
    assert set(result.failed) == {"here/a", "here/a/file", "here/b"}
    for path in ("../outside/x", str(outside / "x"), "a/../../outside/x", "", "."):
        assert bring(OutputFile(path=path, size=1)).files == []
    assert bring(OutputFile(path="here/pipe", kind="pipe")).files == []
    links = [
        OutputFile(path=f"l{i}", kind="link", target=t)
        for i, t in enumerate(["/", "a/../..", "c/p/../../etc"])
    ]
    assert len(bring(*links).left_out) == 3
    assert list(outside.iterdir()) == []


def test_fetch_of_single_file(node: NodeChannel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    known = listing(node, tmp_path / "link")
    assert [(file.path, file.size) for file in known.files] == [("link", 1)]
    assert known.place == str(tmp_path)


def test_end_request_during_fetch_is_answered(
    node: NodeChannel, bring: Bring, tmp_path: Path
) -> None:
    """Its end is asked for by another thread, and answered before what comes of a file."""
    content = os.urandom(3 << 19)
    (tmp_path / "node/here/file").write_bytes(content)
    pieces = 0

    def asks(size: int) -> None:
        nonlocal pieces
        pieces += 1
        if pieces == 1:  # before the first piece is asked for
            node.post(Ping())

    assert bring(progress=asks).files == ["here/file"]
    assert (tmp_path / "here/file").read_bytes() == content
    assert node.ask(Ping(), 60).time


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", ".", "a/.."])
def test_plain_refuses_paths_outside(path: str) -> None:
    assert not fetch.is_plain_path(path)
    assert fetch.is_plain_path("a b/c'd")
