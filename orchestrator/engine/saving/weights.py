"""The whole weights of a model that is spread over the ranks: as a state dict, or in files.

One tensor after the other is put together on all ranks and kept by the first, so that no rank needs
more than the largest tensor beside its own shards.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from orchestrator.common import files
from orchestrator.common.errors import JobFailed, OrchestratorError, UsageError
from orchestrator.engine.ranks import plain_names
from orchestrator.engine.ranks.agreement import memory
from orchestrator.engine.ranks.ranks import gather, is_first
from orchestrator.engine.sharding.mesh import plain_class, reshard

TORCH = (".pt", ".pth", ".bin")


@dataclass(frozen=True)
class Entry:
    """A tensor that is to be written into a safetensors file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the model's state dict with whole tensors in host memory, on rank 0; {} on the others.

    Every rank has to call it. What two modules share is one tensor under two names.
    """
    reshard(model)
    return _gathered(plain_names.state_dict(model))


def _gathered(local: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    copies: dict[int, Tensor] = {}
    for name, value in local.items():
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
    elif adapters_of(model):
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
            f"save({str(path)!r}): this is not a kind of file that can be written",
            "NAME.safetensors, NAME.pt, or a directory for the layout of Hugging Face",
        )


def _write_torch(path: Path, state: dict[str, Any]) -> None:
    with files.replacing(path, files.AS_USUAL) as file:
        torch.save(state, file)


def _write_directory(model: nn.Module, path: Path, step: int) -> None:
    """Write the layout of Hugging Face, with the config of a model that has one."""
    parts = parts_of(entries_of(model))

    def write_configs() -> None:
        path.mkdir(parents=True, exist_ok=True)
        configs = configs_of(model, plain_class(model).__name__)
        write_texts(path, configs)

    on_first(path, write_configs)
    for name, entries in parts.items():
        _write_file(model, path / name, entries, step)
    on_first(path, lambda: write_texts(path, index_of(parts)))


def _write_adapter(model: Any, path: Path) -> None:
    """Write what peft trains, and its config, by peft: the base model is where it came from."""
    reshard(model)
    adapters = set(adapters_of(model))
    trained = {
        name
        for name, parameter in plain_names.parameters(model, every=True)
        if parameter.requires_grad or adapters & set(name.split("."))
    }
    adapter = {
        name: value for name, value in plain_names.state_dict(model).items() if name in trained
    }
    state = _gathered(adapter)
    inner: Any = plain_names.inner(model)
    on_first(path, lambda: inner.save_pretrained(path, state_dict=state))


def entries_of(model: nn.Module) -> list[Entry]:
    state = plain_names.state_dict(model)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    for name, value in tensors.items():
        if value.dtype not in NAMES:
            raise UsageError(
                f"{name} is {value.dtype}, which safetensors files cannot hold",
                'save("NAME.pt") can',
            )
    return in_order(Entry(name, v.dtype, tuple(v.shape)) for name, v in tensors.items())


def _write_file(model: nn.Module, path: Path, entries: Sequence[Entry], step: int) -> None:
    """Write on rank 0 what all put together; all go on to the end, should its disk be full."""
    reshard(model)
    wholes = _wholes(plain_names.state_dict(model), entries)
    problem: OSError | None = None
    try:
        if is_first():
            head = header(entries, {"step": str(step)})
            write(path, head, wholes)
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


# -- the safetensors format, written without the package of that name ------------------------------


NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT_BYTES = 8  # the largest element; the data begins there


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Put the widest elements first, so that every tensor is aligned."""
    return sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))


def header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """Write everything before the data."""
    described: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    begin = 0
    for entry in entries:
        end = begin + entry.bytes
        described[entry.name] = {
            "dtype": NAMES[entry.dtype],
            "shape": [*entry.shape],
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def write(out: Path, head: bytes, tensors: Iterable[Tensor]) -> None:
    """Write the file whole or not at all, of contiguous tensors in the order of the header."""
    with files.replacing(out, files.AS_USUAL) as file:
        file.write(head)
        for value in tensors:
            file.write(memory(value))
            del value  # before the next one needs the place


# -- the directory that Hugging Face's from_pretrained reads ---------------------------------------


LARGEST_FILE_BYTES = 5 * 10**9  # as save_pretrained has it
WEIGHTS = "model.safetensors"
OF_ADAPTER = "adapter_config.json"
INDEX = f"{WEIGHTS}.index.json"
# A config, or the code of a class of the user's own; none of the files with weights.
PLAIN = re.compile(r"(?!model\.safetensors)[A-Za-z0-9_][A-Za-z0-9_.-]*\.(json|py)")


def parts_of(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Split into files of at most LARGEST_FILE_BYTES, but with at least one tensor each."""
    parts: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if parts[-1] and size + entry.bytes > LARGEST_FILE_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += entry.bytes
    if len(parts) == 1:
        return {WEIGHTS: parts[0]}
    return {
        f"model-{number:05d}-of-{len(parts):05d}.safetensors": part
        for number, part in enumerate(parts, 1)
    }


def index_of(parts: Mapping[str, Sequence[Entry]]) -> dict[str, str]:
    """Return the text of the index by its name, which only weights in several parts have."""
    if len(parts) == 1:
        return {}
    where = {entry.name: name for name, entries in parts.items() for entry in entries}
    size = sum(entry.bytes for entries in parts.values() for entry in entries)
    index = {"metadata": {"total_size": size}, "weight_map": where}
    return {INDEX: json.dumps(index, indent=2) + "\n"}


def write_texts(directory: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        files.replace(directory / name, text, files.AS_USUAL)


def adapters_of(model: Any) -> dict[str, Any]:
    """Return the configs of the adapters that peft has put into a model; of any other, nothing."""
    configs = getattr(model, "peft_config", None)
    writes_itself = isinstance(configs, Mapping) and hasattr(model, "save_pretrained")
    return {**configs} if writes_itself and configs is not None else {}


def configs_of(model: Any, class_name: str) -> dict[str, str]:
    """Return the texts of config.json, generation_config.json and what belongs to them by their
    names, as the model's own config writes them; nothing for a model that has none."""
    for adapter in adapters_of(model).values():
        return _texts_of(
            adapter
        )  # with the base model's, from_pretrained would look for its weights
    config: Any = getattr(model, "config", None)
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
    """Read the texts from a checkpoint, whose author is unknown: plain names of plain files.

    ValueError if it has anything else.
    """
    configs = progress.get("configs", {})
    if not isinstance(configs, dict):
        raise ValueError("configs")
    for name, text in configs.items():
        if not (PLAIN.fullmatch(name) and isinstance(text, str)):
            raise ValueError(name)
    return dict(configs)


def with_dtype(configs: Mapping[str, str], dtype: torch.dtype | None) -> dict[str, str]:
    """Make config.json name the dtype that the weights were converted to: they are loaded as it."""
    texts = dict(configs)
    if dtype is None or "config.json" not in texts:
        return texts
    config = json.loads(texts["config.json"])
    if not isinstance(config, dict):
        raise ValueError("config.json")
    for key in ("dtype", "torch_dtype"):  # the latter before transformers 5
        if key in config:
            config[key] = str(dtype).removeprefix("torch.")
    return texts | {"config.json": json.dumps(config, indent=2, sort_keys=True) + "\n"}
