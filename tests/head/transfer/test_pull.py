"""A pull skips what does not fit the disk, and reads each checkpoint from nodes that have it."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.common.errors import EXIT_FAILED, EXIT_NODE, NodeError, UsageError
from orchestrator.common.folder import Folder
from orchestrator.head.commands.machines.transfer import exit_code
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.transfer import pull
from orchestrator.head.transfer.pull import PulledNode, PullSource
from orchestrator.head.transfer.tree import Moved
from orchestrator.protocol.requests.transfer import ListPath, OutputFile, OutputFiles
from orchestrator.records import checkpoint_manifest
from orchestrator.records.checkpoint_manifest import FileRecord, Manifest


def offered(root: Path, index: int, *files: tuple[str, int]) -> PulledNode:
    question = ListPath(path="x", directory="/")
    folder = Folder(root, private=False)
    source = PullSource(index, f"n{index}", Node(f"n{index}"), question, folder, replace=True)
    listed = tuple(
        OutputFile(path=path, kind="file", size=size, mode=0o600, changed=0, target="")
        for path, size in files
    )
    listing = OutputFiles(files=listed, place="/x")
    return PulledNode(source, cast(Any, None), listing, first=list(listed))


def test_make_place_refuses_invalid_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="file/node_0 cannot be made here: not a dir") as raised:
        pull.make_place(Folder(tmp_path / "file/node_0", private=False))
    refused = Moved(0, "a", "file/node_0", error=raised.value)
    # All nodes were reached.
    assert exit_code([refused]) == EXIT_FAILED
    assert exit_code([refused, Moved(1, "b", "", error=NodeError("lost"))]) == EXIT_NODE
    pull.make_place(Folder(tmp_path / "new/node_0", private=False))
    assert (tmp_path / "new/node_0").is_dir()


# -- which node gives which file of a checkpoint --------------------------------------------------

STEP = "checkpoints/step_00000008"
FILES = {name: FileRecord(3, name * 64) for name in "abc"}


def manifest() -> bytes:
    hosts = {name: f"n{name}" for name in FILES}
    return checkpoint_manifest.manifest_to_json(
        Manifest(8, 8.0, None, 3, FILES, "s", hosts)
    ).encode()


def with_step(root: Path, index: int, names: str, size: int = 3) -> PulledNode:
    files = [(f"{STEP}/{name}", size) for name in (*names, "manifest.json")]
    return replace(offered(root, index, *files), manifests={STEP: manifest()})


def test_gather_takes_each_part_once(tmp_path: Path) -> None:
    givers, short = pull.checkpoint_sources(
        [with_step(tmp_path, 0, "ab"), with_step(tmp_path, 2, "bc")]
    )
    given = {"a": 0, "b": 2, "c": 2, "manifest.json": 0}
    assert givers == {f"{STEP}/{name}": node for name, node in given.items()}
    assert short == {}


def test_gather_names_missing_or_damaged_parts(tmp_path: Path) -> None:
    nodes = [with_step(tmp_path, 0, "ab"), with_step(tmp_path, 1, "c", size=2)]
    assert pull.checkpoint_sources(nodes) == ({}, {STEP: "step 8 lacks c (written by nc)"})
    broken = replace(offered(tmp_path, 0), manifests={STEP: b"{"})
    assert "not JSON" in pull.checkpoint_sources([broken])[1][STEP]
