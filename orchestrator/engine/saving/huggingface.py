"""The directory that Hugging Face's from_pretrained reads: weights in parts, an index, configs."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from orchestrator.common import files
from orchestrator.engine.saving.safetensors_file import Entry

LARGEST_FILE = 5 * 10**9  # bytes, as save_pretrained has it
WEIGHTS = "model.safetensors"
OF_ADAPTER = "adapter_config.json"
INDEX = f"{WEIGHTS}.index.json"
# A config, or the code of a class of the user's own; none of the files with weights.
PLAIN = re.compile(r"(?!model\.safetensors)[A-Za-z0-9_][A-Za-z0-9_.-]*\.(json|py)")


@dataclass(frozen=True)
class Part:
    """One of the files with weights."""

    name: str
    entries: Sequence[Entry]


def parts_of(entries: Sequence[Entry]) -> list[Part]:
    """Split into files of at most LARGEST_FILE, but with at least one tensor each."""
    parts: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if parts[-1] and size + entry.size > LARGEST_FILE:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += entry.size
    if len(parts) == 1:
        return [Part(WEIGHTS, parts[0])]
    return [
        Part(f"model-{number:05d}-of-{len(parts):05d}.safetensors", own)
        for number, own in enumerate(parts, 1)
    ]


def index_of(parts: Sequence[Part]) -> dict[str, str]:
    """Give the text of the index by its name, which only weights in several parts have."""
    if len(parts) == 1:
        return {}
    where = {entry.name: part.name for part in parts for entry in part.entries}
    size = sum(entry.size for part in parts for entry in part.entries)
    index = {"metadata": {"total_size": size}, "weight_map": where}
    return {INDEX: json.dumps(index, indent=2) + "\n"}


def write_texts(directory: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        files.replace(directory / name, text, files.AS_USUAL)


def adapters_of(model: Any) -> dict[str, Any]:
    """Return the configs of the adapters that peft has put into a model; of any other, nothing."""
    configs = getattr(model, "peft_config", None)
    own = isinstance(configs, Mapping) and hasattr(model, "save_pretrained")
    return {**configs} if own and configs is not None else {}


def configs_of(model: Any, class_name: str) -> dict[str, str]:
    """Give the texts of config.json, generation_config.json and what belongs to them by their
    names, as the model's own config writes them; nothing for a model that has none."""
    for own in adapters_of(model).values():
        return _texts_of(own)  # with the base model's, from_pretrained would look for its weights
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
    """Take the texts from a checkpoint that anybody may have written: plain names of plain files.

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
    """Let config.json name the dtype that the weights were converted to: they are loaded as it."""
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
