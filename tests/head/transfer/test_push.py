"""Files to a node: only what is lacking, continued where it broke off, and never elsewhere."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.common.folder import IS_DIRECTORY
from orchestrator.head.commands.machines.transfer import notes_on
from orchestrator.head.connect.subprocess_transport import LocalTransport
from orchestrator.head.nodes.node_list import Node, NumberedNode
from orchestrator.head.screen.progress import ProgressBar
from orchestrator.head.transfer import push as pushing
from orchestrator.head.transfer.tree import Moved
from tests.head.transfer.nodes import tree

pytestmark = pytest.mark.slow

Push = Callable[..., Moved]


@pytest.fixture
def push(tmp_path: Path) -> Push:
    """Send tmp_path/here to a node's server on this machine, as tmp_path/there."""
    (tmp_path / "here").mkdir()
    node = NumberedNode(0, Node("here", python=sys.executable))

    def push(source: str = "here", destination: str = "there", dry_run: bool = False) -> Moved:
        cargo = pushing.load_cargo(tmp_path / source, f"{tmp_path}/{destination}")
        bar = ProgressBar("sending", 0)
        (result,) = pushing.push_cargo(LocalTransport(), [node], cargo, bar, dry_run=dry_run)
        assert result.error is None, result.error
        return result

    return push


def test_push_sends_tree_then_changes(push: Push, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "empty").mkdir()
    (here / "a b" / "c").mkdir(parents=True)
    (here / "a b" / "c" / "it's\nodd").write_bytes(os.urandom(3 << 18))
    (here / os.fsdecode(b"\xff\xfe")).touch()
    (here / ".hidden").write_text("x")
    (here / "program").write_text("x")
    (here / "program").chmod(0o755)
    (here / "link").symlink_to("/anywhere")
    assert push(dry_run=True).files and not there.exists()
    first = push()
    assert (len(first.files), first.kept, first.failed) == (4, 0, {})
    assert tree(there, times=True) == tree(here, times=True)
    again = push()
    assert (again.files, again.kept, again.size) == ([], 4, 0)
    (here / "program").write_text("y")
    os.utime(here / ".hidden", (1, 1))
    (here / "link").unlink()
    (here / "link").symlink_to("program")
    (there / "own").write_text("stays")
    changed = push()
    assert (changed.files, changed.size) == ([".hidden", "program"], 2)
    (there / "own").unlink()
    assert tree(there, times=True) == tree(here, times=True)


def test_push_follows_no_link(push: Push, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "here/a").mkdir()
    (tmp_path / "here/a/file").write_text("x")
    (tmp_path / "here/b").write_text("x")
    (tmp_path / "here/c").write_text("x")
    (tmp_path / "there").mkdir()
    (tmp_path / "there/a").symlink_to(outside)
    (tmp_path / "there/b").symlink_to(outside / "b")
    result = push()
    assert set(result.failed) == {"a", "a/file", "b"} and result.files == ["c"]
    assert list(outside.iterdir()) == []


def test_push_renames_single_file(push: Push, tmp_path: Path) -> None:
    (tmp_path / "here/file").write_text("x")
    assert push("here/file", "there/other").files == ["other"]
    assert (tmp_path / "there/other").read_text() == "x"
    assert push("here/file", "there/").files == ["file"]


def test_load_refuses_invalid_arguments(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        pushing.load_cargo(tmp_path / "nothing", None)
    with pytest.raises(UsageError, match="in full"):
        pushing.load_cargo(tmp_path, "relative")
    with pytest.raises(UsageError, match="DST is empty"):
        pushing.load_cargo(tmp_path, "")


def test_push_onto_taken_name_is_explained(push: Push, tmp_path: Path) -> None:
    (tmp_path / "here/file").write_text("x")
    (tmp_path / "there/file").mkdir(parents=True)
    part = push("here/file", "there/file")
    assert part.failed == {"file": IS_DIRECTORY}
    cargo = pushing.load_cargo(tmp_path / "here/file", str(tmp_path / "there/file"))
    (note,) = notes_on(cargo, [part])
    assert note.endswith(f"write a / at the end: {tmp_path}/there/file/")
    assert push("here/file", "there/file/").files == ["file"]
    (tmp_path / "plain").write_text("x")
    with pytest.raises(AssertionError, match="Not a directory"):
        push("here", "plain")
