"""A checkpoint is data: no function that its pickles name is run."""

import enum
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from orchestrator.common.errors import CheckFailed
from orchestrator.engine.saving import writer
from orchestrator.engine.saving.reader import METADATA, find_misfit, load_into, metadata_of
from orchestrator.records import checkpoint_store
from orchestrator.records.checkpoint_manifest import describe_file
from tests.records.test_checkpoint_store import publish

KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)


class Attack:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def saved(directory: Path, **state: Any) -> Path:
    save(state, storage_writer=FileSystemWriter(directory))
    return directory


@pytest.mark.parametrize("by", ["torch", "us"])
def test_every_dtype_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """Of a file of torch's, and of several files of ours, whose checksums are right."""
    state = {str(kind): torch.ones(3, 2).to(kind) for kind in KINDS}
    if by == "torch":
        saved(tmp_path / "step", **state)
    else:
        state["long"] = torch.arange(3 * writer.BUFFER_BYTES, dtype=torch.uint8)
        monkeypatch.setattr(writer, "PART_BYTES", 1)
        ours = writer.Writer(tmp_path / "step", apart=False)
        save(state, storage_writer=ours, planner=writer.StagedPlanner(state, lowest=False))
        files = {path.name: path for path in (tmp_path / "step").iterdir()}
        assert len(files) == writer.MOST_PARTS + 1
        assert ours.fs.records == {name: describe_file(path) for name, path in files.items()}
    found = {name: torch.zeros_like(value) for name, value in state.items()}
    assert not find_misfit(found, metadata_of(tmp_path / "step"))
    load_into(found, tmp_path / "step")
    for name, value in state.items():
        assert torch.equal(found[name], value)


@pytest.mark.parametrize("named", [True, False])
def test_enums_of_any_python_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Python 3.11.2, which is Debian 12's, names getattr: no training could go on there."""

    def reduced(one: enum.Enum, _: object) -> Any:
        return (getattr, (type(one), one.name)) if named else (type(one), (one.value,))

    monkeypatch.setattr(enum.Enum, "__reduce_ex__", reduced)
    path = saved(tmp_path / "step", x=torch.ones(2))
    assert (b"getattr" in (path / METADATA).read_bytes()) == named
    metadata = metadata_of(path)
    properties = metadata.state_dict_metadata["x"].properties  # type: ignore[union-attr]
    assert properties.memory_format is torch.contiguous_format


@pytest.mark.parametrize(
    "where", ["whole", "inside", "torch.load", "torch.nn.Module", "enum", "Metadata", "_MEM"]
)
def test_code_in_metadata_is_not_run(tmp_path: Path, where: str) -> None:
    path, mark = saved(tmp_path / "step", x=torch.ones(2)), tmp_path / "run"
    metadata = metadata_of(path)
    if where == "whole":
        (path / METADATA).write_bytes(pickle.dumps(Attack(mark)))
    elif where == "inside":
        metadata.planner_data = {"x": Attack(mark)}
        (path / METADATA).write_bytes(pickle.dumps(metadata))
    elif where == "enum":
        # Known modules also hold the names that they have imported.
        (path / METADATA).write_bytes(b"ctorch.distributed.checkpoint.metadata\nEnum\n.")
    elif where in ("Metadata", "_MEM"):
        # On an enum, getattr() returns members alone.
        name = "_MEM_FORMAT_ENCODING" if where == "_MEM" else where
        program = f"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n{name}\n"
        (path / METADATA).write_bytes(f"{program}V__init__\ntR.".encode())
    else:
        module, _, name = where.rpartition(".")
        (path / METADATA).write_bytes(f"c{module}\n{name}\n.".encode())
    with pytest.raises(CheckFailed, match=r"which no checkpoint of torch has"):
        metadata_of(path)
    assert not mark.exists()


def test_other_pickle_is_no_metadata(tmp_path: Path) -> None:
    path = saved(tmp_path / "step", x=torch.ones(2))
    (path / METADATA).write_bytes(pickle.dumps({"x": 1}))
    with pytest.raises(CheckFailed, match="is not that of a checkpoint"):
        metadata_of(path)


def test_pickle_in_place_of_tensor_is_not_loaded(tmp_path: Path) -> None:
    mark = tmp_path / "run"
    path = saved(tmp_path / "step", x=Attack(mark))
    metadata = metadata_of(path)
    assert isinstance(metadata, Metadata)
    assert isinstance(metadata.state_dict_metadata["x"], BytesStorageMetadata)
    assert find_misfit({"x": torch.zeros(2)}, metadata) == "not all of x is there"
    with pytest.raises(CheckFailed, match="x is not a tensor there"):
        load_into({"x": torch.zeros(2)}, path)
    assert not mark.exists()


# -- whose it is ------------------------------------------------------------------------------


def published(directory: Path, step: int) -> Path:
    partial = saved(checkpoint_store.partial_path(directory, step, "token"), x=torch.ones(2))
    names = sorted(path.name for path in partial.iterdir())
    files = {name: checkpoint_store.describe_file(partial / name) for name in names}
    return publish(partial, directory, step, {}, 1, files)


def test_published_files_are_not_writable_by_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = published(tmp_path, 1)
    finally:
        os.umask(before)
    assert not any(inner.stat().st_mode & 0o022 for inner in (path, *path.iterdir()))
    assert checkpoint_store.load_checkpoint(path).complete
