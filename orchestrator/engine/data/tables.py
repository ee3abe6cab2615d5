"""Hugging Face datasets as a list of samples: dicts of numbers, lists of numbers, and text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from orchestrator.common.errors import CheckFailed, import_optional


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
