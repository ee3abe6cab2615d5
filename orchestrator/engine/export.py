"""Write the weights of a checkpoint as one safetensors file, or in Hugging Face's layout.

`orchestrator checkpoint export` runs this module; `python -m orchestrator.engine.export CHECKPOINT
OUT` is the same by hand. It needs no process group, and memory for twice the weights: once as
tensors, once as the file.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from orchestrator.common.errors import (
    EXIT_STOPPED,
    CheckFailed,
    JobFailed,
    OrchestratorError,
    UsageError,
)
from orchestrator.common.text import plural
from orchestrator.engine.saving import weights
from orchestrator.engine.saving.reader import METADATA, find_misfit, load_into, metadata_of
from orchestrator.engine.sharding.copies import DTYPES
from orchestrator.records import checkpoint_store
from orchestrator.records.checkpoint_store import shown_name

# engine/saving/checkpoint.py puts this prefix before the names of parameters and buffers.
MODEL = "model."
# engine/core/average.py names the weights of an average like this.
AVERAGES = re.compile(r"kept\.ema(?: [^\[]+)?\['weights'\]\['(.+)'\]")
LAYOUTS = ("file", "huggingface")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.engine.export")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, help="of floating-point tensors")
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="what OUT becomes")
    parser.add_argument("--ema", action="store_true", help="the average of the weights")
    parser.add_argument("--force", action="store_true", help="replace OUT")
    options = parser.parse_args()
    try:
        report = export_weights(
            options.checkpoint,
            options.out,
            options.dtype,
            options.force,
            options.layout,
            ema=options.ema,
        )
    except OrchestratorError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_STOPPED
    sys.stdout.write(report + "\n")
    return 0


def export_weights(
    path: Path,
    out: Path,
    dtype: str | None = None,
    force: bool = False,
    layout: str = "file",
    *,
    ema: bool = False,
) -> str:
    """Write OUT atomically and return a sentence about it.

    CheckFailed is raised only for a damaged checkpoint: the caller may then try an older one.
    """
    refuse_target(out, force=force, layout=layout)
    try:
        step, tensors, configs = read_checkpoint(path, DTYPES[dtype] if dtype else None, ema=ema)
        if layout == "file":
            weights.write_weights(out, tensors, step)
        else:
            write_directory(tensors, configs, step, out)
    except OSError as error:
        name = shown_name(error.filename or out)
        raise JobFailed(f"{shown_name(out)} is not written: {name}: {error.strerror}") from error
    count = plural(len(tensors), "tensor")
    size = (out if layout == "file" else out / weights.WEIGHTS).stat().st_size
    lacks = (
        "\n  without config.json: the checkpoint has none"
        if layout != "file" and not configs
        else ""
    )
    return f"step {step}: {count}, {size:,} bytes: {shown_name(out)}{lacks}"


def refuse_target(out: Path, *, force: bool, layout: str) -> None:
    if not out.parent.is_dir():
        raise UsageError(
            f"{shown_name(out)} is in a directory that does not exist", "name the file to write"
        )
    if layout == "file" and out.is_dir():
        raise UsageError(
            f"{shown_name(out)} is a directory",
            "name the file to write; --layout huggingface writes a directory",
        )
    if layout != "file" and os.path.lexists(out) and not out.is_dir():
        raise UsageError(f"{shown_name(out)} is a file", "name the directory to write")
    empty = layout != "file" and out.is_dir() and not any(out.iterdir())
    if os.path.lexists(out) and not empty and not force:
        raise UsageError(f"{shown_name(out)} already exists", "--force replaces it")


def write_directory(
    tensors: Mapping[str, Tensor], configs: Mapping[str, str], step: int, out: Path
) -> None:
    """Write a directory in Hugging Face's layout; weights of an earlier export go last."""
    out.mkdir(exist_ok=True)
    weights.write_texts(out, configs)
    weights.write_weights(out / weights.WEIGHTS, tensors, step)
    for old in {*out.glob("*.safetensors"), out / weights.INDEX} - {out / weights.WEIGHTS}:
        old.unlink(missing_ok=True)


def read_checkpoint(
    path: Path, wanted: torch.dtype | None, *, ema: bool
) -> tuple[int, dict[str, Tensor], dict[str, str]]:
    """Verify a checkpoint; return its step, its weights by name, and the model's config files.

    A tied weight is saved once and returned under each of its names, as load_state_dict needs.
    """
    checkpoint = checkpoint_store.load_checkpoint(path)
    if problems := checkpoint_store.verify_checkpoint(checkpoint):
        raise CheckFailed(f"{shown_name(path)} is not exported: {'; '.join(problems[:3])}")
    if METADATA not in checkpoint.files:
        raise JobFailed(f"{shown_name(path)} is not exported: it has no {METADATA}")
    metadata = metadata_of(path)
    progress = checkpoint.progress if isinstance(checkpoint.progress, dict) else {}
    keys = keys_of(metadata, ema=ema)
    if not keys:
        raise JobFailed(f"{shown_name(path)} is not exported: nothing in it is called {MODEL}*")
    try:
        configs = weights.read_configs(progress)
    except ValueError as error:
        raise JobFailed(
            f"{shown_name(path)} is not exported: "
            f"its copy of the model's config is damaged: {error}"
        ) from None
    state = {}
    for key in keys.values():
        stored: Any = metadata.state_dict_metadata[key]
        kind = stored.properties.dtype
        kind = wanted if wanted and kind.is_floating_point else kind
        state[key] = torch.empty(stored.size, dtype=kind)
    if problem := find_misfit(state, metadata):
        raise JobFailed(f"{shown_name(path)} is not exported: {shown_name(problem)}")
    # DCP converts the saved tensors to the dtypes of `state`.
    load_into(state, path)
    for key, value in state.items():
        if wanted == torch.float16 == value.dtype and value.isinf().any():
            raise UsageError(
                f"{shown_name(key)} has values above 65504, the largest of fp16",
                "take --dtype bf16",
            )
    tensors = {name: state[key] for name, key in keys.items()}
    aliases = progress.get("aliases", {}).items()
    tensors |= {alias: tensors[name] for alias, name in aliases if name in tensors}
    return checkpoint.step, tensors, configs


def keys_of(metadata: Metadata, *, ema: bool) -> dict[str, str]:
    """Map each tensor's name in OUT to its name in the checkpoint; averages replace weights."""
    stored = metadata.state_dict_metadata
    tensors = [key for key in stored if isinstance(stored[key], TensorStorageMetadata)]
    keys = {key.removeprefix(MODEL): key for key in tensors if key.startswith(MODEL)}
    if ema:
        averages = map(AVERAGES.fullmatch, tensors)
        found = {match[1]: match[0] for match in averages if match and match[1] in keys}
        if not found:
            raise UsageError(
                "--ema asks for an average of the weights, and the checkpoint has none",
                "Trainer(..., ema=0.999), or training.ema, keeps one",
            )
        keys |= found
    return keys


if __name__ == "__main__":
    sys.exit(main())
