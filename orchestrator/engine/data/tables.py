"""Files of records as a list of samples: JSON lines, CSV, Parquet, and Hugging Face datasets.

A sample is a dict of its columns: numbers, lists of numbers (tensors), text. JSON lines and CSV are
mapped into memory, and of each line only the place is kept, 8 bytes; the others need a package.
"""

from __future__ import annotations

import csv
import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import default_collate

from orchestrator.common.errors import CheckFailed, import_optional
from orchestrator.config.schema import SUFFIXES

LOOKED_AT = 100  # records of a CSV file, to know which columns are numbers


class Records(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


class Table:
    """Records with some of their columns, under the names that the model expects."""

    def __init__(self, records: Records, columns: Mapping[str, str], name: str) -> None:
        self.records, self.columns, self.name = records, columns, name
        if not len(records):
            raise CheckFailed(f"{name} has no records")
        there = records[0]
        if missing := sorted(set(columns.values()) - set(there)):
            raise CheckFailed(
                f"dataset.columns names {missing[0]!r}, which {name} does not have",
                f"it has {', '.join(there)}",
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
    """Make tensors of lists of numbers, which torch would else put together the other way round."""
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
        return Several([open_table(file) for file in files])
    try:
        if path.suffix == ".parquet":
            return Parquet(path)
        return Csv(path) if path.suffix == ".csv" else JsonLines(path)
    except OSError as error:
        raise CheckFailed(f"{path} cannot be read: {error.strerror or error}") from None


class Several:
    """Files one after the other."""

    def __init__(self, parts: Sequence[Records]) -> None:
        self.parts = parts
        self.ends = torch.tensor([len(part) for part in parts]).cumsum(0)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        number = int(torch.searchsorted(self.ends, index, right=True))
        return self.parts[number][index - (int(self.ends[number - 1]) if number else 0)]


class Lines:
    """A mapped file of text, and where each record in it begins."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            empty = not path.stat().st_size
            self.bytes: Any = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.starts = self._starts()

    def _starts(self) -> Tensor:
        starts, begin = torch.empty(0, dtype=torch.int64), 0
        latest: list[int] = []
        for end in self._ends():
            if self.bytes[begin:end].strip():
                latest.append(begin)
            begin = end
            if len(latest) == 1 << 16:
                starts, latest = torch.cat([starts, torch.tensor(latest)]), []
        return torch.cat([starts, torch.tensor(latest, dtype=torch.int64)])

    def _ends(self) -> Iterator[int]:
        """Give the ends of lines."""
        end = 0
        while end < len(self.bytes):
            newline = self.bytes.find(b"\n", end)
            end = len(self.bytes) if newline < 0 else newline + 1
            yield end

    def text(self, index: int) -> str:
        begin = int(self.starts[index])
        last = index + 1 == len(self.starts)
        end = len(self.bytes) if last else int(self.starts[index + 1])
        try:
            text: str = self.bytes[begin:end].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.broken(index, str(error)) from None
        return text

    def broken(self, index: int, problem: str) -> CheckFailed:
        line = self.bytes[: int(self.starts[index])].count(b"\n") + 1
        return CheckFailed(f"line {line} of {self.path}: {problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)  # each worker maps it by itself


class JsonLines(Lines):
    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        try:
            record = json.loads(self.text(index))
        except ValueError as error:
            raise self.broken(index, str(error)) from None
        if not isinstance(record, dict):
            raise self.broken(index, "this is not an object of names and values")
        return record


class Csv(Lines):
    """With a line of names. A column is of whole numbers, of numbers or of text, as it begins."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if not len(self.starts):
            raise CheckFailed(f"{path} has not even a line of names")
        self.names = self._values(0)
        shown = [self._values(index) for index in range(1, min(len(self.starts), LOOKED_AT))]
        self.kinds = [kind_of([row[i] for row in shown if i < len(row)])
                      for i in range(len(self.names))]  # fmt: skip

    def _ends(self) -> Iterator[int]:
        """Give the ends of records: a line may end within a quoted field, which goes on."""
        begin, quotes = 0, 0
        for end in super()._ends():
            quotes += self.bytes[begin:end].count(b'"')
            begin = end
            if quotes % 2 == 0:
                yield end
        if quotes % 2:
            yield len(self.bytes)

    def _values(self, index: int) -> list[str]:
        return next(csv.reader(self.text(index).splitlines(keepends=True)))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        values = self._values(index + 1)
        if len(values) != len(self.names):
            raise self.broken(index + 1, f"{len(values)} values for {len(self.names)} columns")
        record: dict[str, Any] = {}
        for name, kind, value in zip(self.names, self.kinds, values, strict=True):
            try:
                record[name] = kind(value)
            except ValueError:
                what = "whole numbers" if kind is int else "numbers"
                raise self.broken(index + 1, f"{name} is {value!r}, after {what}") from None
        return record


def kind_of(values: Sequence[str]) -> type[int] | type[float] | type[str]:
    for kind in (int, float):
        try:
            for value in values:
                kind(value)
        except ValueError:
            continue
        return kind
    return str


class Parquet:
    """Read whole, as columns in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.table: Any = package("pyarrow.parquet", "pyarrow").read_table(path)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        (record,) = self.table.slice(index, 1).to_pylist()
        row: Mapping[str, Any] = record
        return row


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
