"""Read torch's checkpoints as data: torch itself runs whatever their pickles name.

torch.distributed.checkpoint unpickles `.metadata` and each entry that is no tensor without looking
at what they are. Here only the classes of a checkpoint's metadata are known, and only tensors load.
"""

from __future__ import annotations

import enum
import io
import operator
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from orchestrator.common.errors import CheckFailed
from orchestrator.engine.saving.pieces import Piece, Place

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


def metadata_in(data: bytes) -> Metadata:
    metadata = MetadataUnpickler(io.BytesIO(data)).load()
    if not isinstance(metadata, Metadata):
        raise CheckFailed(f"its {METADATA} is not that of a checkpoint")
    return metadata


def metadata_of(path: Path) -> Metadata:
    """Read the metadata of the checkpoint in a directory."""
    return metadata_in((path / METADATA).read_bytes())


def places_in(metadata: Metadata) -> dict[str, list[Place]]:
    """Say of each file which parts of tensors it holds."""
    files: dict[str, list[Place]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            for chunk in entry.chunks:
                stored = (metadata.storage_data or {})[MetadataIndex(name, chunk.offsets)]
                place = Place(tuple(chunk.offsets), tuple(chunk.sizes), name,
                              str(entry.properties.dtype), tuple(entry.size))  # fmt: skip
                files.setdefault(stored.relative_path, []).append(place)
    return files


class PieceReader(DefaultLoadPlanner):
    """Have torch copy pieces of a checkpoint's files into tensors."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__()
        self.reader = FileSystemReader(path)
        self.reader.set_up_storage_reader(metadata, is_coordinator=False)
        self.into: Sequence[Tensor] = ()

    def read(self, pieces: Sequence[Piece], into: Sequence[Tensor]) -> None:
        items = []
        for number, piece in enumerate(pieces):
            place, shape = piece.place, torch.Size(piece.box.shape)
            start = torch.Size(map(operator.sub, piece.box.start, place.start))
            stored = MetadataIndex(place.name, torch.Size(place.start))
            wanted = MetadataIndex(place.name, index=number)
            items.append(ReadItem(LoadItemType.TENSOR, wanted, start, stored, start, shape))
        self.into = into
        self.reader.read_data(LoadPlan(items), self)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self.into[read_item.dest_index.index or 0]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Leave it at the copy."""
