"""Read a model's weights from safetensors, each rank its own rows: no rank ever holds a whole one.

A file, or a directory as Hugging Face has it: one file, or several with an index.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.engine.ranks import plain_names
from orchestrator.engine.saving.weights import INDEX, NAMES, memory
from orchestrator.engine.sharding.mesh import own_rows

DTYPES = {name: dtype for dtype, name in NAMES.items()}
PIECE_BYTES = 1 << 24  # read at a time
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # as JSON may be
AGAIN = "fetch or copy it again"
LARGEST_HEADER_BYTES = 1 << 27  # bytes; a number that makes no sense is not one of this format


@dataclass(frozen=True)
class Stored:
    """The place of a tensor in a file."""

    path: Path
    first: int  # byte
    dtype: torch.dtype
    shape: tuple[int, ...]


def load(model: nn.Module, path: Path) -> None:
    """Fill all parameters, and the buffers that are kept in a state dict, with what is stored."""
    stored = contents(path)
    names, missing = names_of(model), []
    with torch.no_grad():
        for tensor, own in names.items():
            name = next((name for name in own if name in stored), None)
            if name is None:
                missing.append(own[0])
                continue
            if stored[name].shape != tuple(tensor.shape):
                raise CheckFailed(
                    f"{path}: {name} has the shape {stored[name].shape}, in the model it is"
                    f" {tuple(tensor.shape)}"
                )
            read_into(tensor, stored[name])
    if missing:
        raise CheckFailed(
            f"{path} lacks {len(missing)} of the model's tensors, such as {missing[0]}",
            f"it has {', '.join(list(stored)[:3])} ...: the names of the model's state_dict count",
        )


def names_of(model: nn.Module) -> dict[Tensor, list[str]]:
    """Map each tensor of the state dict to its names: a tied weight has several."""
    kept, names = plain_names.state_dict(model).keys(), dict[Tensor, list[str]]()
    for named in (plain_names.parameters, plain_names.buffers):
        for name, value in named(model, every=True):
            if name in kept:
                names.setdefault(value, []).append(name)
    return names


def refuse_unknown(model: nn.Module, path: Path) -> None:
    """Look before anything is sharded: names, and buffers that nobody can know."""
    contents(path)
    kept = plain_names.state_dict(model).keys()
    for name, buffer in plain_names.buffers(model):
        if buffer.is_meta and name not in kept:
            raise UsageError(
                f"the buffer {name} is on the meta device, and no file has it",
                'make it with device="cpu", or set it after the model is made',
            )


# -- the files ------------------------------------------------------------------------------------


def contents(path: Path) -> dict[str, Stored]:
    """Name all tensors of a file, or of the files of a directory."""
    return {
        plain_names.plain(name): stored
        for file in files_of(path)
        for name, stored in header(file).items()
    }


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
    """Say in a sentence that a file cannot be read, or that its content is `malformed`."""
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


def header(path: Path) -> dict[str, Stored]:
    """Read where each tensor is; every one of them is in the file with all of its bytes."""
    with readable(path, "is not a safetensors file, or is damaged"):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            text = file.read(size) if size < LARGEST_HEADER_BYTES else b""
            end = os.fstat(file.fileno()).st_size
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        return {name: stored_at(path, 8 + size, end, name, entries[name]) for name in entries}


def stored_at(path: Path, begin: int, end: int, name: str, entry: Any) -> Stored:
    """Check one entry of a header against the file, whose tensors are between these bytes."""
    first, last = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if entry["dtype"] not in DTYPES:
        raise UsageError(
            f"weights: {path} has {name} as {entry['dtype']}, which this program cannot read",
            "convert it to one of " + ", ".join(DTYPES),
        )
    dtype = DTYPES[entry["dtype"]]
    if not all(type(number) is int and number >= 0 for number in (first, last, *shape)):
        raise ValueError
    if last - first != math.prod(shape) * dtype.itemsize:
        raise ValueError
    if begin + last > end:
        raise UsageError(
            f"weights: {path} is cut off: its header names {begin + last:,} bytes, and it has"
            f" {end:,}",
            AGAIN,
        )
    return Stored(path, begin + first, dtype, shape)


def read_into(tensor: Tensor, stored: Stored) -> None:
    """Read this rank's rows, in pieces; what is stored in another dtype is converted."""
    local, rows = own_rows(tensor) if tensor.dim() else (tensor, range(1))
    width = math.prod(stored.shape[1:])
    flat = local.detach().reshape(-1) if local.is_contiguous() else torch.empty_like(local).view(-1)
    done = 0
    for piece in pieces(stored, rows.start * width, len(rows) * width):
        flat[done : done + piece.numel()].copy_(piece)
        done += piece.numel()
    if not local.is_contiguous():
        local.copy_(flat.view(local.shape))


def pieces(stored: Stored, first: int, count: int) -> Iterator[Tensor]:
    """Read elements of a tensor, a piece at a time."""
    each = max(1, PIECE_BYTES // stored.dtype.itemsize)
    with stored.path.open("rb", buffering=0) as file:
        file.seek(stored.first + first * stored.dtype.itemsize)
        for start in range(0, count, each):
            piece = torch.empty(min(each, count - start), dtype=stored.dtype)
            if read_whole(file, memoryview(memory(piece))) < piece.nbytes:
                raise CheckFailed(f"{stored.path} is shorter than its header says")
            yield piece


def read_whole(file: Any, memory: memoryview) -> int:
    done = 0
    while done < len(memory) and (count := file.readinto(memory[done:])):
        done += count
    return done
