"""Read a model's weights from safetensors, each rank its own rows: no rank ever holds a whole one.

A file, or a directory as Hugging Face has it: one file, or several with an index.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.common.errors import CheckFailed, OrchestratorError, UsageError, import_optional
from orchestrator.engine.ranks import plain_names
from orchestrator.engine.saving.weights import INDEX
from orchestrator.engine.sharding.mesh import local_part, local_tensor

PIECE_BYTES = 1 << 24  # read at a time


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file."""

    name: str
    key: str  # its name there
    shape: tuple[int, ...]
    file: Path


def load(model: nn.Module, path: Path) -> None:
    """Fill all parameters, and the buffers that are kept in a state dict, with what is stored."""
    stored = contents(path)
    found, missing = dict[Tensor, Stored](), []
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


def contents(path: Path) -> dict[str, Stored]:
    """Return where each tensor is in a file, or in the files of a directory."""
    return {entry.name: entry for file in files_of(path) for entry in tensors_in(file)}


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


def weight_map(index: Path) -> dict[str, str]:
    """Read which file has which tensor."""
    try:
        return dict(json.loads(index.read_bytes())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise unreadable(index, error) from None


def tensors_in(path: Path) -> list[Stored]:
    try:
        with opened(path) as file:
            return [
                Stored(plain_names.plain(key), key, tuple(file.get_slice(key).get_shape()), path)
                for key in file.keys()  # noqa: SIM118 (it is no mapping)
            ]
    except Exception as error:  # noqa: BLE001 (safetensors raises its own for a damaged file)
        raise unreadable(path, error) from None


def opened(path: Path) -> Any:
    safetensors = import_optional(
        "safetensors",
        "safetensors",
        "model.weights and weights= need the package safetensors, which",
    )
    return safetensors.safe_open(path, "pt")


def unreadable(path: Path, error: Exception) -> Exception:
    if isinstance(error, OrchestratorError):
        return error
    return UsageError(
        f"weights: {path} cannot be read: {getattr(error, 'strerror', None) or error}",
        "fetch or copy it again",
    )


def read_into(tensor: Tensor, entry: Stored, first: int) -> None:
    """Read rows of a tensor, a few megabytes at a time; they are converted to its dtype."""
    if tuple(tensor.shape[1:]) != entry.shape[1:]:
        raise CheckFailed(f"{entry.name} is not spread by rows; only rows can be read")
    with opened(entry.file) as file:
        if not tensor.dim():
            tensor.copy_(file.get_tensor(entry.key))
            return
        stored = file.get_slice(entry.key)
        rows = max(1, PIECE_BYTES // max(1, tensor[:1].nbytes)) if len(tensor) else 1
        for start in range(0, len(tensor), rows):
            part = tensor[start : start + rows]
            part.copy_(stored[first + start : first + start + len(part)])
