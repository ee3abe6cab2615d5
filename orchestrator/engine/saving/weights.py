"""A model's weights in common file formats: .safetensors, .pt, and Hugging Face's directories.

To write a sharded model, all ranks gather its tensors one after another, and rank 0 keeps them. To
start with weights from a file, each rank reads its own rows.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from orchestrator.common import files
from orchestrator.common.errors import (
    CheckFailed,
    OrchestratorError,
    UsageError,
    import_optional,
)
from orchestrator.engine.ranks import plain_names
from orchestrator.engine.ranks.ranks import as_failure, is_first, run_together
from orchestrator.engine.sharding.mesh import local_part, local_tensor, plain_class, reshard_model

TORCH = (".pt", ".pth", ".bin")
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
# Matches configs and the code of a user's own classes, not files with weights.
PLAIN = re.compile(r"(?!model\.safetensors)[A-Za-z0-9_][A-Za-z0-9_.-]*\.(json|py)")
NEED = "the files of weights need the package safetensors, which"


def state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the model's state dict with whole tensors in host memory, on rank 0; {} on the others.

    Every rank has to call it. A tensor that two modules share is one tensor under two names.
    """
    reshard_model(model)
    state: dict[str, Any] = {}
    copies: dict[int, Tensor] = {}
    for name, value in plain_names.state_dict(model).items():
        if isinstance(value, Tensor) and id(value) not in copies:
            whole = whole_tensor(value)
            copies[id(value)] = whole.to("cpu", copy=True) if is_first() else torch.empty(0)
        state[name] = copies.get(id(value), value)
    return state if is_first() else {}


def whole_tensor(value: Tensor) -> Tensor:
    value = value.detach()
    if not isinstance(value, DTensor):
        return value
    # NCCL needs offloaded shards on the device.
    device = value.device_mesh.device_type
    on_device: Any = value if value.device.type == device else value.to(device)
    whole: Tensor = on_device.full_tensor()
    return whole


# -- writing --------------------------------------------------------------------------------------


def save_weights(model: nn.Module, path: Path, step: int) -> None:
    """Write the weights in the format of PATH: .safetensors, .pt, or a Hugging Face directory.

    Every rank has to call it. An error on rank 0 is raised on all ranks.
    """
    said = functools.partial(as_failure, lead=f"{path} is not written: ")
    run_together(lambda: refuse_unknown_kind(model, path), here=is_first(), said=said)
    state = state_dict(model)
    run_together(lambda: _write(model, path, state, step), here=is_first(), said=said)


def refuse_unknown_kind(model: nn.Module, path: Path) -> None:
    known = path.suffix in (".safetensors", "", *TORCH)
    if not known or (path.exists() and path.is_dir() != (not path.suffix)):
        raise UsageError(
            f"save({str(path)!r}): this is not a kind of file that can be written",
            "NAME.safetensors, NAME.pt, or a directory for the layout of Hugging Face",
        )
    if not path.suffix and hasattr(model, "peft_config"):
        raise UsageError(
            f"save({str(path)!r}): the model has an adapter, whose directory peft writes",
            "state = trainer.state_dict() on all ranks, then on rank 0"
            " model.save_pretrained(DIR, state_dict=state)",
        )


def _write(model: nn.Module, path: Path, state: dict[str, Any], step: int) -> None:
    if path.suffix in TORCH:
        with files.open_replacement(path, files.AS_USUAL) as file:
            torch.save(state, file)
    elif path.suffix:
        write_weights(path, state, step)
    else:
        path.mkdir(parents=True, exist_ok=True)
        write_texts(path, configs_of(model, plain_class(model).__name__))
        write_weights(path / WEIGHTS, state, step)


def write_weights(path: Path, state: Mapping[str, Any], step: int) -> None:
    """Write a safetensors file atomically. A tensor under two names is written twice."""
    safetensors = import_optional("safetensors.torch", "safetensors", NEED)
    tensors: dict[str, Tensor] = {}
    seen = set[int]()
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensors[name] = value.clone() if id(value) in seen else value.contiguous()
            seen.add(id(value))
    try:
        content = safetensors.save(tensors, {"format": "pt", "step": str(step)})
    except KeyError as error:
        raise UsageError(
            f"a tensor is {error.args[0]}, which safetensors files cannot hold",
            'save("NAME.pt") can',
        ) from None
    with files.open_replacement(path, files.AS_USUAL) as file:
        file.write(content)


# -- the configs beside Hugging Face's weights ----------------------------------------------------


def write_texts(directory: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        files.replace_file(directory / name, text, files.AS_USUAL)


def configs_of(model: Any, class_name: str) -> dict[str, str]:
    """Return config.json, generation_config.json and files beside them as {name: text}.

    The model's own config writes them. The result is empty for a model without one.
    """
    if hasattr(model, "peft_config"):
        # With the config of the base model, a loader would look for its weights.
        return {}
    # A copy, because the model's own config stays as the user made it.
    config: Any = copy.copy(getattr(model, "config", None))
    if hasattr(config, "save_pretrained"):
        config.architectures = [class_name]
    return _texts_of(config) | _texts_of(getattr(model, "generation_config", None))


def _texts_of(config: Any) -> dict[str, str]:
    if not hasattr(config, "save_pretrained"):
        return {}
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(Path(directory))
        return {
            path.name: path.read_text(encoding="utf-8")
            for path in sorted(Path(directory).iterdir())
            if PLAIN.fullmatch(path.name)
        }


def read_configs(progress: Mapping[str, Any]) -> dict[str, str]:
    """Return the config files in a checkpoint's progress as {name: text}.

    The checkpoint is not trusted. Raise ValueError unless all names and texts are plain.
    """
    configs = progress.get("configs", {})
    if not isinstance(configs, dict):
        raise ValueError("configs")
    for name, text in configs.items():
        if not (PLAIN.fullmatch(name) and isinstance(text, str)):
            raise ValueError(name)
    return dict(configs)


# -- reading --------------------------------------------------------------------------------------


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill all parameters and saved buffers of a model. Each rank reads its own rows."""
    stored = tensor_files(path)
    found, missing = dict[Tensor, str](), []
    for tensor, names in names_of(model).items():
        if name := next((name for name in names if name in stored), None):
            found[tensor] = name
        else:
            missing.append(names[0])
    if missing:
        raise CheckFailed(
            f"{path} lacks {len(missing)} of the model's tensors, such as {missing[0]}",
            f"it has {', '.join([*stored][:3])} ...: the names of the model's state_dict count",
        )
    for tensor, name in found.items():
        read_into(tensor, name, *stored[name])


def names_of(model: nn.Module) -> dict[Tensor, list[str]]:
    """Return the names of each tensor of the state dict. A tied weight has several."""
    kept, names = plain_names.state_dict(model).keys(), dict[Tensor, list[str]]()
    for named in (plain_names.named_parameters, plain_names.named_buffers):
        for name, value in named(model, every=True):
            if name in kept:
                names.setdefault(value, []).append(name)
    return names


def read_into(tensor: Tensor, name: str, path: Path, key: str) -> None:
    """Read this rank's rows of a tensor, and convert them to its dtype."""
    local, (starts, _) = local_tensor(tensor), local_part(tensor)
    with torch.no_grad(), open_weights(path) as file:
        part = file.get_slice(key)
        shape = tuple(part.get_shape())
        if shape != tuple(tensor.shape):
            raise CheckFailed(
                f"{path}: {name} has the shape {shape} there, and {tuple(tensor.shape)} here"
            )
        if not shape:
            local.copy_(file.get_tensor(key))
        elif tuple(local.shape[1:]) != shape[1:]:
            raise CheckFailed(f"{name} is not spread by rows; only rows can be read")
        elif len(local):
            local.copy_(part[starts[0] : starts[0] + len(local)])


def refuse_unreadable(model: nn.Module, path: Path) -> None:
    """Raise UsageError for unreadable files or for buffers that no file has.

    It is called before the model is sharded.
    """
    tensor_files(path)
    kept = plain_names.state_dict(model).keys()
    for name, buffer in plain_names.named_buffers(model):
        if buffer.is_meta and name not in kept:
            raise UsageError(
                f"the buffer {name} is on the meta device, and no file has it",
                'make it with device="cpu", or set it after the model is made',
            )


def tensor_files(path: Path) -> dict[str, tuple[Path, str]]:
    """Return the file of each tensor and its key there, by its name in the model."""
    found: dict[str, tuple[Path, str]] = {}
    for file in files_of(path):
        try:
            with open_weights(file) as tensors:
                found |= {plain_names.plain_name(key): (file, key) for key in tensors.keys()}  # noqa: SIM118
        except OrchestratorError:
            raise
        # safetensors raises its own class for a damaged file.
        except Exception as error:  # noqa: BLE001
            raise unreadable_error(file, error) from None
    return found


def files_of(path: Path) -> list[Path]:
    """Return the weight files of a Hugging Face directory, or the file that `path` is."""
    if not path.is_dir():
        return [path]
    index = path / INDEX
    if index.exists():
        try:
            names = dict(json.loads(index.read_bytes())["weight_map"]).values()
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise unreadable_error(index, error) from None
        return [path / name for name in dict.fromkeys(names)]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise UsageError(f"weights: there is no .safetensors file in {path}")
    return found


def open_weights(path: Path) -> Any:
    return import_optional("safetensors", "safetensors", NEED).safe_open(path, "pt")


def unreadable_error(path: Path, error: Exception) -> UsageError:
    return UsageError(
        f"weights: {path} cannot be read: {getattr(error, 'strerror', None) or error}",
        "fetch or copy it again",
    )
