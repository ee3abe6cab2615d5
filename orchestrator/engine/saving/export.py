"""Write the weights of a checkpoint as one safetensors file.

`python -m orchestrator.engine.saving.export CHECKPOINT OUT` does it by hand.

`orchestrator checkpoint export` runs it. It needs no process group, and memory for twice the
largest tensor only: one after the other is put together from its shards and written.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from orchestrator.engine.saving import safetensors_file
from orchestrator.engine.saving.safetensors_file import NAMES, Entry
from orchestrator.errors import EXIT_STOPPED, CheckFailed, JobFailed, OrchestratorError, UsageError
from orchestrator.records import checkpoint_store
from orchestrator.records.checkpoint_store import shown

WEIGHTS = "model."  # what engine/checkpoint.py puts before the names of parameters and buffers
CHOICES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.engine.saving.export")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=CHOICES, help="of floating-point tensors")
    parser.add_argument("--force", action="store_true", help="replace OUT")
    options = parser.parse_args()
    try:
        told = export(options.checkpoint, options.out, options.dtype, options.force)
    except OrchestratorError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_STOPPED
    sys.stdout.write(told + "\n")
    return 0


def export(path: Path, out: Path, dtype: str | None = None, force: bool = False) -> str:
    """Write OUT, whole or not at all; what was written, in words.

    CheckFailed only where the checkpoint is damaged: then an older one may do.
    """
    if out.is_dir() or not out.parent.is_dir():
        problem = "is a directory" if out.is_dir() else "is in a directory that does not exist"
        raise UsageError(f"{shown(out)} {problem}", "name the file to write")
    if os.path.lexists(out) and not force:
        raise UsageError(f"{shown(out)} is there already", "--force replaces it")
    found = checkpoint_store.load(path)
    problems = checkpoint_store.verify(found)
    if problems:
        raise CheckFailed(f"{shown(path)} is not exported: {'; '.join(problems[:3])}")
    if ".metadata" not in found.files:
        raise JobFailed(f"{shown(path)} is not exported: it has no .metadata")
    try:
        reader = FileSystemReader(path)
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        weights = weights_of(metadata, CHOICES[dtype] if dtype else None, found.progress)
        if not weights:
            raise JobFailed(f"{shown(path)} is not exported: nothing in it is called {WEIGHTS}*")
        entries = safetensors_file.in_order(
            Entry(name, weight.kind, tuple(stored(metadata, weight.key).size))
            for name, weight in weights.items()
        )
        head = safetensors_file.header(entries, {"step": str(found.step)})
        tensors = (tensor(reader, metadata, *weights[entry.name]) for entry in entries)
        safetensors_file.write(out, head, tensors)
    except OSError as error:
        name = shown(error.filename or out)
        raise JobFailed(f"{shown(out)} is not written: {name}: {error.strerror}") from error
    return f"step {found.step}: {len(weights)} tensors, {out.stat().st_size:,} bytes: {shown(out)}"


class Weight(NamedTuple):
    key: str  # in the checkpoint
    kind: torch.dtype  # in OUT


def weights_of(metadata: Metadata, wanted: torch.dtype | None, progress: Any) -> dict[str, Weight]:
    """Give the tensors of OUT by their names there.

    A tied weight is saved once and written under each of its names, as load_state_dict wants it.
    """
    weights = {}
    for key, stored in metadata.state_dict_metadata.items():
        if not key.startswith(WEIGHTS):
            continue
        if not isinstance(stored, TensorStorageMetadata):
            sys.stderr.write(f"left out: {shown(key)} is not a tensor\n")
            continue
        kind = stored.properties.dtype
        kind = wanted if wanted and kind.is_floating_point else kind
        if kind not in NAMES:
            raise JobFailed(f"{shown(key)} is {kind}, which safetensors files cannot hold")
        weights[key.removeprefix(WEIGHTS)] = Weight(key, kind)
    aliases = progress.get("aliases", {}) if isinstance(progress, dict) else {}
    return weights | {alias: weights[name] for alias, name in aliases.items() if name in weights}


def stored(metadata: Metadata, key: str) -> TensorStorageMetadata:
    found = metadata.state_dict_metadata[key]
    assert isinstance(found, TensorStorageMetadata)
    return found


def tensor(reader: FileSystemReader, metadata: Metadata, key: str, kind: torch.dtype) -> Tensor:
    """One tensor, put together from its shards, which become this dtype on the way."""
    about = stored(metadata, key)
    if sum(chunk.sizes.numel() for chunk in about.chunks) != about.size.numel():
        raise JobFailed(f"{shown(key)} is not exported: its shards do not make up the whole")
    value = torch.empty(about.size, dtype=kind)
    planner = DefaultLoadPlanner()
    planner.set_up_planner({key: value}, metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    if kind != about.properties.dtype and kind == torch.float16 and value.isinf().any():
        raise UsageError(
            f"{shown(key)} has values above 65504, the largest of fp16", "take --dtype bf16"
        )
    return value


if __name__ == "__main__":
    sys.exit(main())
