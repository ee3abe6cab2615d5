"""Which node gives which file of a checkpoint to the head."""

from __future__ import annotations

from pathlib import Path

from orchestrator.head.transfer.fetch.gathered import NodeOffer, gather
from orchestrator.protocol.requests.transfer import OutputFile
from orchestrator.records import checkpoint_manifest
from orchestrator.records.checkpoint_manifest import FileRecord, Manifest

STEP = "checkpoints/step_00000008"
FILES = {name: FileRecord(3, name * 64) for name in "abc"}


def text(save: str = "s", world: int = 3) -> bytes:
    hosts = {name: f"n{name}" for name in FILES}
    return checkpoint_manifest.to_json(Manifest(8, 8.0, None, world, FILES, save, hosts)).encode()


def offered(node: int, names: str, manifest: bytes, size: int = 3) -> NodeOffer:
    files = [OutputFile(path=f"{STEP}/{name}", size=size) for name in names]
    files.append(OutputFile(path=f"{STEP}/manifest.json", size=len(manifest)))
    return NodeOffer(node, files, {STEP: manifest})


def test_parts_and_copies_come_once_each(tmp_path: Path) -> None:
    given = gather([offered(0, "ab", text()), offered(2, "bc", text())], tmp_path)
    assert given.givers == {
        f"{STEP}/a": 0,
        f"{STEP}/b": 2,
        f"{STEP}/c": 2,
        f"{STEP}/manifest.json": 0,
    }
    assert given.short == {}


def test_what_is_nowhere_or_of_another_size_is_named(tmp_path: Path) -> None:
    given = gather([offered(0, "ab", text()), offered(1, "c", text(), size=2)], tmp_path)
    assert given.givers == {}
    assert given.short == {STEP: "step 8 lacks c (written by nc)"}
    broken = NodeOffer(0, (), {STEP: b"{"})
    assert "no JSON" in gather([broken], tmp_path).short[STEP]


def test_one_that_has_begun_to_come_is_gone_on_with(tmp_path: Path) -> None:
    nodes = [offered(node, "abc", text(world=node + 1)) for node in range(3)]
    for node in range(3):
        (tmp_path / STEP).mkdir(parents=True, exist_ok=True)
        (tmp_path / STEP / "manifest.json").write_bytes(text(world=node + 1))
        assert set(gather(nodes, tmp_path).givers.values()) == {node}
