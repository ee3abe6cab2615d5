"""Files of records as a list of samples: JSON lines, CSV, Parquet, and Hugging Face datasets.

A sample is a dict of its columns: numbers, lists of numbers (tensors), text. JSON lines are mapped
into memory, and 8 bytes are kept for each line. CSV and Parquet are read whole.
"""

from __future__ import annotations

import csv
import json
import mmap
import re
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import ConcatDataset, default_collate

from orchestrator.common.errors import CheckFailed, import_optional
from orchestrator.config.schema import SUFFIXES

# A line that is not blank.
LINE = re.compile(rb".*\S.*")


class Records(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


class Table:
    """Records with some of their columns, under the names that the model expects."""

    def __init__(self, records: Records, columns: Mapping[str, str], name: str) -> None:
        self.records, self.columns, self.name = records, columns, name
        if not len(records):
            raise CheckFailed(f"{name} has no records")
        if missing := sorted(set(columns.values()) - set(records[0])):
            raise CheckFailed(
                f"dataset.columns names {missing[0]!r}, which {name} does not have",
                f"it has {', '.join(records[0])}",
            )

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self.records[index]
        wanted = self.columns or {name: name for name in record}
        return {name: as_sample(record[column]) for name, column in wanted.items()}

    def collate(self, samples: list[dict[str, Any]]) -> Any:
        try:
            return default_collate(samples)
        except (RuntimeError, KeyError, TypeError) as error:
            raise CheckFailed(
                f"records of {self.name} do not make a batch: {error}",
                "make lists equally long and leave nothing out, choose dataset.columns, or give a"
                " dataset.target that has a method collate(samples)",
            ) from None


def as_sample(value: Any) -> Any:
    """Return a list of numbers as a tensor, whose batches have a row for each sample."""
    return torch.tensor(value) if isinstance(value, list) and is_numbers(value) else value


def is_numbers(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(is_numbers(inner) for inner in value)
    return isinstance(value, (int, float))


def open_table(path: Path) -> Records:
    """Open a file by its suffix, or all such files of a directory in the order of their names."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not files:
            raise CheckFailed(f"{path} has no file that ends in {', '.join(SUFFIXES)}")
        parts: list[Any] = [open_table(file) for file in files]
        return ConcatDataset(parts)
    try:
        if path.suffix == ".parquet":
            return Parquet(path)
        return read_csv(path) if path.suffix == ".csv" else JsonLines(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckFailed(f"{path} cannot be read: {reason}") from None


class JsonLines:
    """A mapped file of JSON objects, one a line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            # An empty file cannot be mapped.
            empty = not path.stat().st_size
            self.text: Any = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.starts = array("q", (line.start() for line in LINE.finditer(self.text)))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        line = LINE.match(self.text, self.starts[index])
        assert line is not None
        try:
            record = json.loads(line.group())
        except ValueError as error:
            raise self._broken(line.start(), str(error)) from None
        if not isinstance(record, dict):
            raise self._broken(line.start(), "this is not an object of names and values")
        return record

    def _broken(self, start: int, problem: str) -> CheckFailed:
        number = self.text[:start].count(b"\n") + 1
        return CheckFailed(f"line {number} of {self.path}: {problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Each worker maps the file by itself.
        return type(self), (self.path,)


def read_csv(path: Path) -> list[dict[str, Any]]:
    """Read a file with a line of names; a column is of whole numbers, of numbers or of text."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        rows = []
        for row in filter(None, reader):
            rows.append(row)
            if len(row) != len(rows[0]):
                problem = f"{len(row)} values for {len(rows[0])} columns"
                raise CheckFailed(f"line {reader.line_num} of {path}: {problem}")
    if not rows:
        raise CheckFailed(f"{path} has not even a line of names")
    names, *values = rows
    columns = [typed(column) for column in zip(*values, strict=True)]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def typed(column: Iterable[str]) -> list[Any]:
    for kind in (int, float):
        try:
            return [kind(value) for value in column]
        except ValueError:
            continue
    return [*column]


class Parquet:
    """Columns in memory."""

    def __init__(self, path: Path) -> None:
        self.table: Any = package("pyarrow.parquet", "pyarrow").read_table(path)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        record: Mapping[str, Any] = self.table.slice(index, 1).to_pylist()[0]
        return record


def hugging_face(name: str, options: Mapping[str, Any]) -> Records:
    """Open a dataset of the hub, or what save_to_disk has written; mapped into memory."""
    datasets = package("datasets", "datasets")
    if Path(name, "dataset_info.json").exists() or Path(name, "dataset_dict.json").exists():
        dataset = datasets.load_from_disk(name)
    else:
        dataset = datasets.load_dataset(name, **{"split": "train", **options})
    if isinstance(dataset, Mapping):
        split = options.get("split", "train")
        if split not in dataset:
            raise CheckFailed(
                f"{name} has no split {split!r}", f"dataset.args: {{split: {next(iter(dataset))}}}"
            )
        dataset = dataset[split]
    records: Records = dataset
    return records


def package(module: str, name: str) -> Any:
    return import_optional(module, name, f"these data need the package {name}, which")
