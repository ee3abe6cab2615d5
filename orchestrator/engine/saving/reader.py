"""Read torch's checkpoints as data: torch itself runs whatever their pickles name.

torch.distributed.checkpoint unpickles `.metadata` and each entry that is no tensor without looking
at what they are. Here only the classes of a checkpoint's metadata are known, and only tensors load.
"""

from __future__ import annotations

import enum
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from orchestrator.common.errors import CheckFailed

METADATA = ".metadata"
# Modules all of whose own classes are plain data: the second is where torch 2.2 had some of them.
OF_METADATA = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed._shard.sharded_tensor.metadata",
)
OTHERS = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "Path")),
}


def member(kind: object, name: object) -> enum.Enum:
    """Stand for getattr(), by which some Pythons pickle the members of an enum (Debian 12's)."""
    if not isinstance(kind, enum.EnumMeta) or name not in kind.__members__:
        raise unknown("builtins.getattr")
    found: enum.Enum = kind[str(name)]
    return found


def unknown(name: str) -> CheckFailed:
    return CheckFailed(
        f"its {METADATA} names {name}, which no checkpoint of torch has",
        "it was damaged, or made to run a program: do not use it",
    )


class MetadataUnpickler(pickle.Unpickler):
    """Unpickle what torch writes into `.metadata`, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return member
        found = super().find_class(module, name) if self.may_be_known(module, name) else None
        own_class = isinstance(found, type) and found.__module__ == module
        if module in OF_METADATA and not own_class:
            found = None
        if module == "torch" and name != "Size" and not isinstance(found, torch.dtype):
            found = None
        if found is None:
            raise unknown(f"{module}.{name}")
        return found

    def may_be_known(self, module: str, name: str) -> bool:
        """Look only into modules that are known: to import another one is to run it."""
        if (module, name) in OTHERS:
            return True
        return "." not in name and (module == "torch" or module in OF_METADATA)


class CheckpointReader(FileSystemReader):
    """torch's reader, with that unpickler."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata = MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise CheckFailed(f"its {METADATA} is not that of a checkpoint")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


class TensorPlanner(DefaultLoadPlanner):
    """torch's planner, which loads no entry that is not a tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckFailed(f"{read_item.dest_index.fqn} is not a tensor in it")
