"""Read a model's weights from safetensors, each rank its own rows: no rank ever holds a whole one.

A file, or a directory as Hugging Face has it: one file, or several with an index.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.engine.ranks import plain_names
from orchestrator.engine.saving.weights import INDEX, NAMES, Entry
from orchestrator.engine.sharding.mesh import local_part, local_tensor

OF_NAMES = {name: dtype for dtype, name in NAMES.items()}
PIECE_BYTES = 1 << 24  # read at a time
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # as JSON may be
AGAIN = "fetch or copy it again"
LARGEST_HEADER_BYTES = 1 << 27  # a number that makes no sense is not one of this format


def load(model: nn.Module, path: Path) -> None:
    """Fill all parameters, and the buffers that are kept in a state dict, with what is stored."""
    stored = contents(path)
    found, missing = dict[Tensor, Entry](), []
    for tensor, targets in names_of(model).items():
        if name := next((name for name in targets if name in stored), None):
            found[tensor] = stored[name]
        else:
            missing.append(targets[0])
    if missing:
        raise CheckFailed(
            f"{path} lacks {len(missing)} of the model's tensors, such as {missing[0]}",
            f"it has {', '.join([*stored][:3])} ...: the names of the model's state_dict count",
        )
    for tensor, entry in found.items():
        if entry.shape != tuple(tensor.shape):
            raise CheckFailed(
                f"{path}: {entry.name} has the shape {entry.shape} there, and"
                f" {tuple(tensor.shape)} here"
            )
    with torch.no_grad():
        for tensor, entry in found.items():
            start, _ = local_part(tensor)
            read_into(local_tensor(tensor), entry, start[0] if start else 0)


def names_of(model: nn.Module) -> dict[Tensor, list[str]]:
    """Map each tensor of the state dict to its names: a tied weight has several."""
    kept, names = plain_names.state_dict(model).keys(), dict[Tensor, list[str]]()
    for named in (plain_names.parameters, plain_names.buffers):
        for name, value in named(model, every=True):
            if name in kept:
                names.setdefault(value, []).append(name)
    return names


def refuse_unknown(model: nn.Module, path: Path) -> None:
    """Look before anything is sharded: names, and buffers that no file has."""
    contents(path)
    kept = plain_names.state_dict(model).keys()
    for name, buffer in plain_names.buffers(model):
        if buffer.is_meta and name not in kept:
            raise UsageError(
                f"the buffer {name} is on the meta device, and no file has it",
                'make it with device="cpu", or set it after the model is made',
            )


# -- the files ------------------------------------------------------------------------------------


def contents(path: Path) -> dict[str, Entry]:
    """Return where each tensor is in a file, or in the files of a directory."""
    return {entry.name: entry for file in files_of(path) for entry in header(file)}


def files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    index = path / INDEX
    if index.exists():
        return [path / name for name in dict.fromkeys(weight_map(index).values())]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UsageError(f"weights: there is no .safetensors file in {path}")
    return files


@contextlib.contextmanager
def readable(path: Path, malformed: str) -> Iterator[None]:
    """Raise in a sentence that a file cannot be read, or that its content is `malformed`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"weights: {path} cannot be read: {error.strerror}") from None
    except MALFORMED:
        raise UsageError(f"weights: {path} {malformed}", AGAIN) from None


def weight_map(index: Path) -> dict[str, str]:
    """Read which file has which tensor."""
    with readable(index, "is damaged: it does not say which file has which tensor"):
        weights = json.loads(index.read_bytes())["weight_map"]
        if not all(isinstance(name, str) and name for name in weights.values()):
            raise ValueError
        return dict(weights)


def header(path: Path) -> list[Entry]:
    """Read where each tensor is; every one of them is in the file with all of its bytes."""
    with readable(path, "is not a safetensors file, or is damaged"):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            text = file.read(size) if size < LARGEST_HEADER_BYTES else b""
            end = os.fstat(file.fileno()).st_size
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        return [stored_at(path, 8 + size, end, name, entries[name]) for name in entries]


def stored_at(path: Path, begin: int, end: int, name: str, entry: Any) -> Entry:
    """Check one entry of a header against the file, whose tensors are between these bytes."""
    first, last = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if entry["dtype"] not in OF_NAMES:
        raise UsageError(
            f"weights: {path} has {name} as {entry['dtype']}, which this program cannot read",
            "convert it to one of " + ", ".join(OF_NAMES),
        )
    if not all(type(number) is int and number >= 0 for number in (first, last, *shape)):
        raise ValueError
    place = Entry(plain_names.plain(name), OF_NAMES[entry["dtype"]], shape, path, begin + first)
    if last - first != place.bytes:
        raise ValueError
    if begin + last > end:
        raise UsageError(
            f"weights: {path} is cut off: its header names {begin + last:,} bytes, and it has"
            f" {end:,}",
            AGAIN,
        )
    return place


def read_into(tensor: Tensor, entry: Entry, first: int) -> None:
    """Read rows of a tensor, a few megabytes at a time; they are converted to its dtype."""
    dtype = entry.dtype
    if tuple(tensor.shape[1:]) != entry.shape[1:]:
        raise CheckFailed(f"{entry.name} is not spread by rows; only rows can be read")
    before = first * math.prod(entry.shape[1:])
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.new_empty(tensor.numel())
    start, size = entry.offset + before * dtype.itemsize, flat.numel() * dtype.itemsize
    file = torch.from_file(str(entry.file), shared=False, size=start + size, dtype=torch.uint8)
    pieces = torch.split(file[start:], PIECE_BYTES)
    for part, piece in zip(torch.split(flat, PIECE_BYTES // dtype.itemsize), pieces, strict=True):
        part.copy_(piece.clone().view(dtype))  # a tensor in a file may begin anywhere
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))
