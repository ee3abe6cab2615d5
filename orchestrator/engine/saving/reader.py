"""Reads torch's checkpoints without running code that they contain.

torch.distributed.checkpoint unpickles `.metadata` and each entry that is no tensor without a check.
This reader accepts only the classes of a checkpoint's metadata, and loads only tensors.
"""

from __future__ import annotations

import enum
import io
import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from orchestrator.common.errors import CheckFailed, OrchestratorError
from orchestrator.engine.ranks.ranks import host_group

MOST_NAMED = 3
# A single process saves and loads without a process group on purpose.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable", UserWarning)
METADATA = ".metadata"
# All classes of these modules are plain data. torch 2.2 had some of them in the second module.
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


def enum_member(kind: object, name: object) -> enum.Enum:
    """Replaces getattr(), with which some Pythons (Debian 12's) pickle members of an enum."""
    if not isinstance(kind, enum.EnumMeta) or name not in kind.__members__:
        raise unknown_name("builtins.getattr")
    found: enum.Enum = kind[str(name)]
    return found


def unknown_name(name: str) -> CheckFailed:
    return CheckFailed(
        f"its {METADATA} names {name}, which no checkpoint of torch has",
        "it was damaged, or made to run a program: do not use it",
    )


class MetadataUnpickler(pickle.Unpickler):
    """Unpickles only the classes that torch writes into `.metadata`."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        found = super().find_class(module, name) if self.may_be_known(module, name) else None
        own_class = isinstance(found, type) and found.__module__ == module
        if module in OF_METADATA and not own_class:
            found = None
        if module == "torch" and name != "Size" and not isinstance(found, torch.dtype):
            found = None
        if found is None:
            raise unknown_name(f"{module}.{name}")
        return found

    def may_be_known(self, module: str, name: str) -> bool:
        """Return True for names of known modules. An import of other modules would run them."""
        if (module, name) in OTHERS:
            return True
        return "." not in name and (module == "torch" or module in OF_METADATA)


def metadata_of(path: Path) -> Metadata:
    """Return the metadata of the checkpoint in a directory."""
    metadata = MetadataUnpickler(io.BytesIO((path / METADATA).read_bytes())).load()
    if not isinstance(metadata, Metadata):
        raise CheckFailed(f"its {METADATA} is not that of a checkpoint")
    return metadata


class SafeReader(FileSystemReader):
    """Reads like torch's own reader, but unpickles the metadata safely."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return metadata_of(Path(self.path))


class TensorPlanner(DefaultLoadPlanner):
    """Plans the load of tensors. Other entries, which torch would unpickle, are refused."""

    def load_bytes(self, read_item: ReadItem, _: io.BytesIO) -> None:
        raise CheckFailed(f"{read_item.dest_index.fqn} is not a tensor there")


def files_for(state: Mapping[str, Any], metadata: Metadata) -> set[str]:
    """Return the files that this rank reads to fill its tensors."""
    planner = DefaultLoadPlanner()
    planner.set_up_planner(dict(state), metadata, is_coordinator=False)
    items, stored = planner.create_local_plan().items, metadata.storage_data or {}
    return {stored[item.storage_index].relative_path for item in items}


def load_into(state: Mapping[str, Tensor], path: Path) -> None:
    """Fill tensors from the files in a directory. Every rank has to call it."""
    together = dist.is_initialized()
    try:
        load(
            dict(state),
            storage_reader=SafeReader(path),
            planner=TensorPlanner(),
            process_group=host_group() if together else None,
            no_dist=not together,
        )
    except CheckpointException as error:
        raise CheckFailed(first_cause(error)) from error


def find_misfit(state: Mapping[str, Tensor], metadata: Metadata) -> str:
    """Return which tensor cannot be filled and why, or an empty string."""
    stored = metadata.state_dict_metadata
    missing = []
    for name, tensor in state.items():
        entry = stored.get(name)
        if not isinstance(entry, TensorStorageMetadata) or (
            sum(chunk.sizes.numel() for chunk in entry.chunks) < entry.size.numel()
        ):
            missing.append(name)
        elif entry.size != tensor.shape:
            return f"{name} has the shape {tuple(entry.size)} there, and {tuple(tensor.shape)} here"
    if not missing:
        return ""
    unused = [name for name in stored if name not in state]
    only_there = f"; only there is {first_names(unused)}" if unused else ""
    return f"not all of {first_names(missing)} is there{only_there}"


def first_names(names: Sequence[str]) -> str:
    """Return the first few names, and the number of the others, as text."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


def first_cause(error: BaseException) -> str:
    """Return one line on why the first rank failed, without the traces of the others."""
    if isinstance(error, CheckpointException) and error.failures:
        inner = next(iter(error.failures.values()))
        error = inner[0] if isinstance(inner, tuple) else inner
    if isinstance(error, OrchestratorError):
        return error.what
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
