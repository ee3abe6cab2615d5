"""Write the weights of a checkpoint as one safetensors file, or as Hugging Face has them.

`python -m orchestrator.engine.export CHECKPOINT OUT` does it by hand.

`orchestrator checkpoint export` runs it. It needs no process group, and memory for twice the
largest tensor only: one after the other is put together from its shards and written.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
from orchestrator.engine.saving import reader
from orchestrator.engine.saving import weights as files
from orchestrator.engine.saving.reader import METADATA, TensorReader, misfit
from orchestrator.engine.saving.weights import NAMES, Entry
from orchestrator.engine.sharding.low_precision import DTYPES
from orchestrator.records import checkpoint_store
from orchestrator.records.checkpoint_store import shown

# What engine/saving/checkpoint.py puts before the names of parameters and buffers.
WEIGHTS = "model."
# And engine/core/average.py before those of an average, which stands for the weights it is of.
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
        report = export(
            options.checkpoint, options.out, options.dtype, options.force, options.layout,
            ema=options.ema,
        )  # fmt: skip
    except OrchestratorError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_STOPPED
    sys.stdout.write(report + "\n")
    return 0


def export(
    path: Path,
    out: Path,
    dtype: str | None = None,
    force: bool = False,
    layout: str = "file",
    *,
    ema: bool = False,
) -> str:
    """Write OUT, whole or not at all, and report it in a sentence.

    CheckFailed only where the checkpoint is damaged: then an older one may do.
    """
    refuse_target(out, force=force, layout=layout)
    wanted = DTYPES[dtype] if dtype else None
    try:
        source = Source.of(path, wanted, ema=ema)
        if layout == "file":
            source.write(out, source.entries)
            size, comment = out.stat().st_size, ""
        else:
            size, comment = write_directory(source, out)
    except OSError as error:
        name = shown(error.filename or out)
        raise JobFailed(f"{shown(out)} is not written: {name}: {error.strerror}") from error
    count = len(source.weights)
    return f"step {source.step}: {plural(count, 'tensor')}, {size:,} bytes: {shown(out)}{comment}"


def refuse_target(out: Path, *, force: bool, layout: str) -> None:
    if not out.parent.is_dir():
        raise UsageError(
            f"{shown(out)} is in a directory that does not exist", "name the file to write"
        )
    if layout == "file" and out.is_dir():
        raise UsageError(
            f"{shown(out)} is a directory",
            "name the file to write; --layout huggingface writes a directory",
        )
    if layout != "file" and os.path.lexists(out) and not out.is_dir():
        raise UsageError(f"{shown(out)} is a file", "name the directory to write")
    empty = layout != "file" and out.is_dir() and not any(out.iterdir())
    if os.path.lexists(out) and not empty and not force:
        raise UsageError(f"{shown(out)} is there already", "--force replaces it")


def write_directory(source: Source, out: Path) -> tuple[int, str]:
    """Write the layout of Hugging Face; return the bytes of it, and what is to be said of it.

    The files move to their place when all are written, weights of an earlier export leave it first.
    """
    if files.OF_ADAPTER in source.configs:
        raise UsageError(
            f"step {source.step} is of a model with an adapter: its directory is written by peft",
            "trainer.save(DIR) in the program, after resume=True; --layout file writes all tensors",
        )
    parts = files.parts_of(source.entries)
    texts = files.index_of(parts) | source.configs
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as directory:
        new = Path(directory)
        for name, entries in parts.items():
            source.write(new / name, entries)
        files.write_texts(new, texts)
        out.mkdir(exist_ok=True)
        for old in (*out.glob("*.safetensors"), out / files.INDEX):
            old.unlink(missing_ok=True)
        for path in new.iterdir():
            path.replace(out / path.name)
    size = sum((out / name).stat().st_size for name in [*parts, *texts])
    comment = "" if source.configs else "\n  without config.json: the checkpoint has none"
    return size, comment


@dataclass(frozen=True)
class Source:
    """The weights of a checkpoint that was verified."""

    step: int
    reader: TensorReader
    weights: Mapping[str, Weight]
    configs: dict[str, str]  # texts of config.json and the like, by their names

    @staticmethod
    def of(path: Path, wanted: torch.dtype | None, *, ema: bool = False) -> Source:
        checkpoint = checkpoint_store.load(path)
        problems = checkpoint_store.verify(checkpoint)
        if problems:
            raise CheckFailed(f"{shown(path)} is not exported: {'; '.join(problems[:3])}")
        if METADATA not in checkpoint.files:
            raise JobFailed(f"{shown(path)} is not exported: it has no {METADATA}")
        metadata = reader.metadata_of(path)
        progress = checkpoint.progress if isinstance(checkpoint.progress, dict) else {}
        weights = weights_of(metadata, wanted, progress.get("aliases", {}), ema=ema)
        if not weights:
            raise JobFailed(f"{shown(path)} is not exported: nothing in it is called {WEIGHTS}*")
        try:
            configs = files.with_dtype(files.read_configs(progress), wanted)
        except (ValueError, RecursionError) as error:
            raise JobFailed(
                f"{shown(path)} is not exported: its copy of the model's config is damaged: {error}"
            ) from None
        return Source(checkpoint.step, TensorReader(path, metadata), weights, configs)

    @property
    def entries(self) -> list[Entry]:
        return files.in_order(
            Entry(name, weight.kind, weight.shape) for name, weight in self.weights.items()
        )

    def write(self, out: Path, entries: Sequence[Entry]) -> None:
        head = files.header(entries, {"step": str(self.step)})
        files.write(out, head, (self.tensor(self.weights[entry.name]) for entry in entries))

    def tensor(self, weight: Weight) -> Tensor:
        """Put one tensor together from its shards, which become its dtype on the way."""
        key, shape = weight.key, weight.shape
        value = torch.empty(shape, dtype=weight.kind)
        if misfit({key: value}, self.reader.metadata):
            raise JobFailed(f"{shown(key)} is not exported: its shards do not make up the whole")
        self.reader.read(key, value)
        if weight.converted and weight.kind == torch.float16 and value.isinf().any():
            raise UsageError(
                f"{shown(key)} has values above 65504, the largest of fp16", "take --dtype bf16"
            )
        return value


class Weight(NamedTuple):
    key: str  # in the checkpoint
    kind: torch.dtype  # in OUT
    shape: tuple[int, ...]
    converted: bool


def weights_of(
    metadata: Metadata,
    wanted: torch.dtype | None,
    aliases: Mapping[str, str],
    *,
    ema: bool = False,
) -> dict[str, Weight]:
    """Give the tensors of OUT by their names there.

    A tied weight is saved once and written under each of its names, as load_state_dict wants it.
    """
    keys = {
        key.removeprefix(WEIGHTS): key
        for key in metadata.state_dict_metadata
        if key.startswith(WEIGHTS)
    }
    if ema:
        averages = map(AVERAGES.fullmatch, metadata.state_dict_metadata)
        found = {match[1]: match[0] for match in averages if match and match[1] in keys}
        if not found:
            raise UsageError(
                "--ema asks for an average of the weights, and the checkpoint has none",
                "Trainer(..., ema=0.999), or training.ema, keeps one",
            )
        keys |= found
    weights = {}
    for name, key in keys.items():
        stored = metadata.state_dict_metadata[key]
        if not isinstance(stored, TensorStorageMetadata):
            sys.stderr.write(f"left out: {shown(key)} is not a tensor\n")
            continue
        own = stored.properties.dtype
        kind = wanted if wanted and own.is_floating_point else own
        if kind not in NAMES:
            raise JobFailed(f"{shown(key)} is {kind}, which safetensors files cannot hold")
        weights[name] = Weight(key, kind, tuple(stored.size), converted=kind != own)
    return weights | {alias: weights[name] for alias, name in aliases.items() if name in weights}


if __name__ == "__main__":
    sys.exit(main())
