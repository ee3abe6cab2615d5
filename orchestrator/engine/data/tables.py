"""Files of records as a list of samples: JSON lines, and Hugging Face datasets.

A sample is a dict of its columns: numbers, lists of numbers (tensors), text. JSON lines are mapped
into memory, and 8 bytes are kept for each line.
"""

from __future__ import annotations

import json
import mmap
import re
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import ConcatDataset, default_collate

from orchestrator.common.errors import CheckFailed, import_optional
from orchestrator.config.schema import LINES

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
    """Open a file of JSON lines, or all of a directory in the order of their names."""
    if path.is_dir():
        files = sorted(path.glob(f"*{LINES}"))
        if not files:
            raise CheckFailed(f"{path} has no file that ends in {LINES}")
        parts: list[Any] = [open_table(file) for file in files]
        return ConcatDataset(parts)
    try:
        return JsonLines(path)
    except OSError as error:
        raise CheckFailed(f"{path} cannot be read: {error.strerror}") from None


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


def hugging_face(name: str, options: Mapping[str, Any]) -> Records:
    """Open a dataset of the hub, or what save_to_disk has written; mapped into memory."""
    datasets = import_optional(
        "datasets", "datasets", "these data need the package datasets, which"
    )
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
