"""Records in files: what a sample holds, where a broken line is, and a run."""

from __future__ import annotations

import json
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.config import parse
from orchestrator.config.schema import Config
from orchestrator.engine.data import sources, tables
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def records(path: Path, text: str | bytes) -> list[dict[str, Any]]:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    found = tables.open_table(path)
    again = pickle.loads(pickle.dumps(found))
    assert [again[index] for index in range(len(again))] == [found[i] for i in range(len(found))]
    return [dict(found[index]) for index in range(len(found))]


def test_json_lines(tmp_path: Path) -> None:
    own = [{"a": 1, "b": "é\n"}, {"a": 2.5, "b": None}]
    text = "\n".join(json.dumps(record) for record in own)
    assert records(tmp_path / "a.jsonl", text) == own
    assert records(tmp_path / "b.jsonl", f"\n{text}\n\n") == own
    assert records(tmp_path / "c.jsonl", "") == []


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": 2]\n', "line 3 of .*a.jsonl: Expecting"),
        ("a.jsonl", '{"a": 1}\n[2]\n', "line 2 .*: this is not an object"),
        ("b.jsonl", b'{"x": "\xff"}\n', "line 1 of .*b.jsonl: 'utf-8' codec"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, name: str, text: str | bytes, words: str) -> None:
    with pytest.raises(CheckFailed, match=words):
        records(tmp_path / name, text)


def test_a_directory_is_its_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"x": 2}\n{"x": 3}\n')
    (tmp_path / "a.jsonl").write_text('{"x": 0}\n{"x": 1}\n')
    (tmp_path / "c.jsonl").write_text("")
    (tmp_path / "README").touch()
    found = tables.open_table(tmp_path)
    assert [found[index]["x"] for index in range(len(found))] == [0, 1, 2, 3]
    with pytest.raises(CheckFailed, match=r"has no file that ends in .jsonl"):
        tables.open_table(tmp_path.parent / "none") if (tmp_path.parent / "none").mkdir() else None
        tables.open_table(tmp_path.parent / "none")


def built(path: Path | str, **more: Any) -> Any:
    keys = {"path": str(path), **more}
    return sources.sources(parse.build(Config, {"dataset": keys, "model": OWN_MODEL}))


OWN_MODEL = {"target": "tests.engine.data.test_tables:Line"}


def test_columns_lists_and_the_part_that_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = ({"x": [i, i + 0.5], "label": i % 2, "note": str(i)} for i in range(20))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    train, held_out = built(path, columns={"inputs": "x", "y": "label"}, eval_fraction=0.1)
    assert (len(train), len(held_out)) == (18, 2)
    batch = train.batch([3, 5], 0)
    assert batch.keys() == {"inputs", "y"}
    assert batch["inputs"].tolist() == [[3, 3.5], [5, 5.5]]
    assert batch["y"].tolist() == [1, 1]
    assert train.batch([3], 0)["inputs"].shape == (1, 2)
    whole, other = built(path, eval_path=str(path))
    assert (len(whole), len(other)) == (20, 20)
    assert whole.batch([7], 0)["note"] == ["7"]
    with pytest.raises(CheckFailed, match=r"dataset.columns names 'lable', which .* does not have"):
        built(path, columns={"y": "lable"})
    path.write_text('{"x": [1]}\n{"x": [1, 2]}\n{"x": [3]}\n')
    with pytest.raises(CheckFailed, match=r"do not make a batch: stack expects each tensor"):
        built(path)[0].batch([0, 1], 0)


def test_what_the_config_says_of_them(tmp_path: Path) -> None:
    assert parse.build(Config, {"dataset": {"path": "a.jsonl"}}).dataset.kind == "records"
    with pytest.raises(UsageError, match=r"parquet files are not read as records any more"):
        parse.build(Config, {"dataset": {"path": "a.parquet"}})
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


# -- a run ----------------------------------------------------------------------------------------


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        apart = self.layer(batch["x"].float()[:, None])[:, 0] - batch["y"]
        return apart.square().sum(), len(apart)


def test_a_run_learns_from_records(tmp_path: Path) -> None:
    """The same on one rank and on two, with workers that open the file by themselves."""
    path = tmp_path / "line.jsonl"
    lines = ({"x": i / 50, "y": 2 * i / 50 + 1} for i in range(100))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    losses = []
    for nodes, size in (([1], 8), ([2], 4)):
        config = {
            "training": {"max_steps": 30, "batch_size": size, "eval_steps": 30},
            "model": OWN_MODEL,
            "dataset": {"path": str(path)},
            "dataloader": {"num_workers": 1},
            "optimizer": {"lr": 0.3},
            "checkpoint": {"at_end": False},
            "logging": {"interval": 1},
        }
        job = Job(str(tmp_path / str(sum(nodes))), nodes, config)
        assert run(job) == [[0] * sum(nodes)], job.output()
        assert "95 samples" in job.output()
        losses.append([line.get("loss") or line["eval_loss"] for line in job.metrics()])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[0][-1] < losses[0][0] / 5
