"""Records in files: what a sample holds, where a broken line is, and a run."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.config import parse
from orchestrator.config.schema import Config
from orchestrator.engine.data import sources

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def records(directory: Path, lines: list[dict[str, Any]], patch: pytest.MonkeyPatch) -> Path:
    """A directory of save_to_disk, and a package that reads it."""
    hub = types.ModuleType("datasets")
    vars(hub).update(load_from_disk=lambda path: lines)
    patch.setitem(sys.modules, "datasets", hub)
    (directory / "dataset_info.json").touch()
    return directory


def built(path: Path | str, **more: Any) -> Any:
    keys = {"kind": "huggingface", "path": str(path), **more}
    return sources.sources(parse.build(Config, {"dataset": keys, "model": OWN_MODEL}))


OWN_MODEL = {"target": "tests.engine.programs.configured:model"}


def test_columns_lists_and_the_part_that_is_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"x": [i, i + 0.5], "label": i % 2, "note": str(i)} for i in range(20)]
    path = records(tmp_path, lines, monkeypatch)
    train, held_out = built(path, columns={"inputs": "x", "y": "label"}, eval_fraction=0.1)
    assert (len(train), len(held_out)) == (18, 2)
    batch = train.batch([3, 5], 0)
    assert batch.keys() == {"inputs", "y"}
    assert batch["inputs"].tolist() == [[3, 3.5], [5, 5.5]]
    assert batch["y"].tolist() == [1, 1]
    assert train.batch([3], 0)["inputs"].shape == (1, 2)
    whole, _ = built(path, eval_fraction=0.0)
    assert whole.batch([7], 0)["note"] == ["7"]
    with pytest.raises(CheckFailed, match=r"dataset.columns names 'lable', which .* does not have"):
        built(path, columns={"y": "lable"})
    records(tmp_path, [{"x": [1]}, {"x": [1, 2]}, {"x": [3]}], monkeypatch)
    with pytest.raises(CheckFailed, match=r"do not make a batch: stack expects each tensor"):
        built(path)[0].batch([0, 1], 0)


def test_what_the_config_says_of_them() -> None:
    with pytest.raises(UsageError, match=r"dataset.path=parquet, and dataset.args=.data_files: a"):
        parse.build(Config, {"dataset": {"path": "a.parquet"}})
    with pytest.raises(UsageError, match=r"dataset.kind=huggingface, dataset.path=json, and"):
        parse.build(Config, {"dataset": {"kind": "records", "path": "data"}})
    assert parse.build(Config, {"dataset": {"path": "a.bin"}}).dataset.kind == "tokens"
    with pytest.raises(UsageError, match=r"'huggingface', but dataset.path names no dataset"):
        parse.build(Config, {"dataset": {"kind": "huggingface"}})
    with pytest.raises(UsageError, match=r"dataset.columns is set, but nothing reads it"):
        parse.build(Config, {"dataset": {"columns": {"a": "b"}}})


# -- packages that are not installed here, with the signatures of the real ones --------------------


def test_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CheckFailed, match=r"-m pip install datasets"):
        built("squad", kind="huggingface")
    rows = [{"x": [1, 2]}, {"x": [3, 4]}, {"x": [5, 6]}]
    hub, asked = types.ModuleType("datasets"), []

    def load_dataset(path: str, name: str | None = None, *, split: str | None = None) -> Any:
        asked.append((path, name, split))
        return rows

    vars(hub).update(load_dataset=load_dataset, load_from_disk=lambda path: {"train": rows})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    train, _ = built("squad", kind="huggingface", args={"name": "small"})
    assert train.batch([0, 1], 0)["x"].tolist() == [[1, 2], [3, 4]]
    assert asked == [("squad", "small", "train")]
    (tmp_path / "dataset_dict.json").touch()
    assert len(built(tmp_path, kind="huggingface")[0]) == 2
    with pytest.raises(CheckFailed, match=r"has no split 'test'"):
        built(tmp_path, kind="huggingface", args={"split": "test"})
