"""The whole weights of a model that is spread over the ranks: as a state dict, or in files.

One tensor after the other is put together on all ranks and kept by the first, so that no rank needs
more than the largest tensor beside its own shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from orchestrator.common import files
from orchestrator.common.errors import JobFailed, OrchestratorError, UsageError
from orchestrator.engine.ranks import plain_names
from orchestrator.engine.ranks.ranks import gather, is_first
from orchestrator.engine.saving import huggingface, safetensors_file
from orchestrator.engine.saving.safetensors_file import NAMES, Entry
from orchestrator.engine.sharding.mesh import plain_class
from orchestrator.engine.sharding.used_parts import shards_again

TORCH = (".pt", ".pth", ".bin")


def state_dict(model: nn.Module) -> dict[str, Any]:
    """Give the model's state dict with whole tensors in host memory, on rank 0; {} on the others.

    Every rank has to call it. What two modules share is one tensor under two names.
    """
    shards_again(model)
    return _gathered(plain_names.state_dict(model))


def _gathered(own: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    copies: dict[int, Tensor] = {}
    for name, value in own.items():
        if not isinstance(value, Tensor):
            state[name] = value
            continue
        if id(value) not in copies:
            whole = whole_tensor(value)
            copies[id(value)] = torch.empty(0)
            if is_first():
                copies[id(value)] = whole.to("cpu", copy=True)
        state[name] = copies[id(value)]
    return state if is_first() else {}


def whole_tensor(value: Tensor) -> Tensor:
    value = value.detach()
    if not isinstance(value, DTensor):
        return value
    device = value.device_mesh.device_type  # offloaded shards are not there, and NCCL needs them
    on_device: Any = value if value.device.type == device else value.to(device)
    whole: Tensor = on_device.full_tensor()
    return whole


# -- files ----------------------------------------------------------------------------------------


def save(model: nn.Module, path: Path, step: int) -> None:
    """Write the weights as PATH says: .safetensors, .pt, or a directory as Hugging Face has it.

    Every rank calls it, and hears what went wrong on the first.
    """
    on_first(path, lambda: refuse_unknown_kind(path))
    if path.suffix in TORCH:
        state = state_dict(model)
        on_first(path, lambda: _write_torch(path, state))
    elif path.suffix:
        _write_file(model, path, entries_of(model), step)
    elif huggingface.adapters_of(model):
        _write_adapter(model, path)
    else:
        _write_directory(model, path, step)


def on_first(path: Path, action: Callable[[], None]) -> None:
    """Do it on rank 0 alone; what goes wrong there is raised on all ranks."""
    problem: tuple[type[OrchestratorError], str, str] | None = None
    try:
        if is_first():
            action()
    except OrchestratorError as error:
        problem = type(error), error.what, error.fix
    except (OSError, RuntimeError) as error:
        problem = JobFailed, f"{path} is not written: {error}", ""
    if first := gather(problem)[0]:
        kind, what, fix = first
        raise kind(what, fix)


def refuse_unknown_kind(path: Path) -> None:
    known = path.suffix in (".safetensors", "", *TORCH)
    if not known or (path.exists() and path.is_dir() != (not path.suffix)):
        raise UsageError(
            f"save({str(path)!r}): this is no kind of file that can be written",
            "NAME.safetensors, NAME.pt, or a directory for the layout of Hugging Face",
        )


def _write_torch(path: Path, state: dict[str, Any]) -> None:
    with files.replacing(path, files.AS_USUAL) as file:
        torch.save(state, file)


def _write_directory(model: nn.Module, path: Path, step: int) -> None:
    """Write the layout of Hugging Face, with the config of a model that has one."""
    parts = huggingface.parts_of(entries_of(model))

    def write_configs() -> None:
        path.mkdir(parents=True, exist_ok=True)
        configs = huggingface.configs_of(model, plain_class(model).__name__)
        huggingface.write_texts(path, configs)

    on_first(path, write_configs)
    for part in parts:
        _write_file(model, path / part.name, part.entries, step)
    on_first(path, lambda: huggingface.write_texts(path, huggingface.index_of(parts)))


def _write_adapter(model: Any, path: Path) -> None:
    """Let peft write what it trains, and its config: the base model is where it came from."""
    shards_again(model)
    adapters = set(huggingface.adapters_of(model))
    trained = {
        name
        for name, parameter in plain_names.parameters(model, every=True)
        if parameter.requires_grad or adapters & set(name.split("."))
    }
    own = {name: value for name, value in plain_names.state_dict(model).items() if name in trained}
    state = _gathered(own)
    inner: Any = plain_names.inner(model)
    on_first(path, lambda: inner.save_pretrained(path, state_dict=state))


def entries_of(model: nn.Module) -> list[Entry]:
    state = plain_names.state_dict(model)
    entries = [Entry(n, v.dtype, tuple(v.shape)) for n, v in state.items() if isinstance(v, Tensor)]
    for entry in entries:
        if entry.dtype not in NAMES:
            raise UsageError(
                f"{entry.name} is {entry.dtype}, which safetensors files cannot hold",
                'save("NAME.pt") can',
            )
    return safetensors_file.in_order(entries)


def _write_file(model: nn.Module, path: Path, entries: Sequence[Entry], step: int) -> None:
    """Write on rank 0 what all put together; all go on to the end, should its disk be full."""
    shards_again(model)
    wholes = _wholes(plain_names.state_dict(model), entries)
    problem: OSError | None = None
    try:
        if is_first():
            head = safetensors_file.header(entries, {"step": str(step)})
            safetensors_file.write(path, head, wholes)
    except OSError as error:
        problem = error
    for _ in wholes:
        pass

    def report() -> None:
        if problem is not None:
            raise problem

    on_first(path, report)


def _wholes(state: Mapping[str, Any], entries: Sequence[Entry]) -> Iterator[Tensor]:
    for entry in entries:
        whole = whole_tensor(state[entry.name])
        yield whole.to("cpu").contiguous() if is_first() else whole
