"""Read a model's weights from safetensors, each rank its own rows: no rank ever holds a whole one.

A file, or a directory as Hugging Face has it: one file, or several with an index.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.engine.ranks.mesh import own_rows
from orchestrator.engine.saving.safetensors_file import NAMES, memory
from orchestrator.errors import CheckFailed, UsageError

DTYPES = {name: dtype for dtype, name in NAMES.items()}
PIECE = 1 << 24  # bytes read at a time
LARGEST_HEADER = 1 << 27  # bytes; a number that makes no sense is not one of this format


@dataclass(frozen=True)
class Stored:
    """Where a tensor is in a file."""

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
    kept, names = model.state_dict().keys(), dict[Tensor, list[str]]()
    for named in (model.named_parameters, model.named_buffers):
        for name, value in named(remove_duplicate=False):
            if name in kept:
                names.setdefault(value, []).append(name)
    return names


def refuse_unknown(model: nn.Module, path: Path) -> None:
    """Look before anything is sharded: names, and buffers that nobody can know."""
    contents(path)
    kept = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in kept:
            raise UsageError(
                f"the buffer {name} is on the meta device, and no file has it",
                'make it with device="cpu", or set it after the model is made',
            )


# -- the files ------------------------------------------------------------------------------------


def contents(path: Path) -> dict[str, Stored]:
    """Name all tensors of a file, or of the files of a directory."""
    return {name: stored for file in files_of(path) for name, stored in header(file).items()}


def files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    index = path / "model.safetensors.index.json"
    if index.exists():
        weights: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return [path / name for name in dict.fromkeys(weights.values())]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise UsageError(f"weights: there is no .safetensors file in {path}")
    return found


def header(path: Path) -> dict[str, Stored]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entries: dict[str, Any] = json.loads(file.read(size) if size < LARGEST_HEADER else b"")
    except OSError as error:
        raise UsageError(f"weights: {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"weights: {path} is not a safetensors file") from None
    entries.pop("__metadata__", None)
    return {
        name: Stored(
            path,
            8 + size + entry["data_offsets"][0],
            DTYPES[entry["dtype"]],
            tuple(entry["shape"]),
        )
        for name, entry in entries.items()
    }


def read_into(tensor: Tensor, stored: Stored) -> None:
    """Read this rank's rows, in pieces; what is stored in another dtype is converted."""
    local, rows = own_rows(tensor) if tensor.dim() else (tensor, range(1))
    width = math.prod(stored.shape[1:])
    flat = local.detach().reshape(-1) if local.is_contiguous() else torch.empty_like(local).view(-1)
    place = 0
    for piece in pieces(stored, rows.start * width, len(rows) * width):
        flat[place : place + piece.numel()].copy_(piece)
        place += piece.numel()
    if not local.is_contiguous():
        local.copy_(flat.view(local.shape))


def pieces(stored: Stored, first: int, count: int) -> Iterator[Tensor]:
    """Read elements of a tensor, a piece at a time."""
    each = max(1, PIECE // stored.dtype.itemsize)
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
