"""Sources of samples: text, token files, synthetic data, a user's dataset.

A source returns batches of samples by index. It has no order, no epochs and no state.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.common.files import expand_home
from orchestrator.config.schema import Config, ModelConfig
from orchestrator.engine.data import tokens
from orchestrator.engine.data.batch import Batches, Micro, ignore_signals
from orchestrator.engine.data.rounds import Order
from orchestrator.engine.models import import_by_name
from orchestrator.engine.models.losses import IGNORED
from orchestrator.engine.ranks.randomness import randomness_kept, seed_all
from orchestrator.engine.ranks.ranks import Ranks, from_rank_0


class Source(Protocol):
    name: str

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int], position: int) -> Any:
        """Return tensors by name. `position` is the first sample's place in the order."""
        ...


def load_sources(config: Config) -> tuple[Source, Source | None]:
    """Return the sources for training and for evaluation."""
    data = config.dataset
    if data.kind == "target":
        # Creating a dataset may take time, so the one for evaluations is skipped without any.
        evaluates = config.training.eval_steps or config.training.eval_seconds
        train = user_source(config, "train")
        return train, user_source(config, "eval") if evaluates else None
    whole = open_source(config, expand_home(data.path or ""))
    if data.eval_path is not None:
        return whole, open_source(config, expand_home(data.eval_path))
    return split_source(whole, data.eval_fraction)


def load_samples(config: Config, ranks: Ranks) -> tuple[TrainingSamples, HeldOutSamples | None]:
    """Return this rank's share of a config's data, for training and for evaluation."""
    train, held_out = load_sources(config)
    if held_out is None:
        return TrainingSamples(train, config, ranks), None
    return TrainingSamples(train, config, ranks), HeldOutSamples(held_out, config, ranks)


def open_source(config: Config, path: str) -> Source:
    data = config.dataset
    if data.kind == "tokens":
        return token_file(config, Path(path))
    if data.kind == "library":
        # The Python versions of nodes may differ, but all ranks need the same samples.
        text = torch.frombuffer(bytearray(from_rank_0(library_text()) or b"\n"), dtype=torch.uint8)
        return Windows(text, data.sequence_length, "Python's library")
    if config.model.kind == "ranking":
        return Clicks(config.model, data.num_samples)
    return Counting(config.model.vocab_size, data.sequence_length, data.num_samples)


def split_source(whole: Source, fraction: float) -> tuple[Source, Source | None]:
    """Return a source without its last samples, and these, which are held out.

    The end is held out, so that data added in front does not change it.
    """
    held_out = max(1, round(len(whole) * fraction)) if fraction else 0
    if len(whole) <= held_out:
        raise CheckFailed(
            f"{whole.name}: that is {len(whole)} sample{'s' * (len(whole) != 1)}, and training"
            " needs at least one" + (" besides the one that is held out" if held_out else ""),
            "use more data or a smaller dataset.sequence_length",
        )
    kept = len(whole) - held_out
    return SourceSlice(whole, 0, kept), SourceSlice(whole, kept, len(whole)) if held_out else None


class SourceSlice:
    """Some of another source's samples."""

    def __init__(self, whole: Source, start: int, stop: int) -> None:
        self.whole, self.start, self.stop = whole, start, stop
        self.name = whole.name

    def __len__(self) -> int:
        return self.stop - self.start

    def batch(self, indices: Sequence[int], position: int) -> Any:
        return self.whole.batch([self.start + index for index in indices], position)


# -- text -------------------------------------------------------------------------------------


class Windows:
    """Samples that are consecutive windows of a long text.

    A window has `length` + 1 tokens. Its last token is only a target, and the next window's first.
    """

    def __init__(self, text: Tensor, length: int, name: str) -> None:
        self.text, self.length = text, length
        self.name = f"{name}, read in samples of dataset.sequence_length {length} + 1"

    def __len__(self) -> int:
        return max(0, (self.text.numel() - 1) // self.length)

    def batch(self, indices: Sequence[int], position: int) -> dict[str, Tensor]:
        starts = [index * self.length for index in indices]
        rows = [self.text[start : start + self.length + 1].long() for start in starts]
        return shift_tokens(torch.stack(rows))


def shift_tokens(rows: Tensor) -> dict[str, Tensor]:
    """Return the tokens of each row as inputs, and their successors as targets."""
    return {"inputs": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


class TokenFile(Windows):
    """A memory-mapped file. Its pages are cached once for all processes of a node."""

    def __init__(self, path: Path, header: tokens.Header, length: int) -> None:
        self.path, self.header = path, header
        dtype = getattr(torch, header.dtype)
        skipped = tokens.HEADER // dtype.itemsize
        size = skipped + header.count
        text = torch.from_file(str(path), shared=False, size=size, dtype=dtype)
        super().__init__(text[skipped:], length, str(path))

    def __reduce__(self) -> tuple[Any, ...]:
        # Each worker maps the file by itself.
        return TokenFile, (self.path, self.header, self.length)


def token_file(config: Config, path: Path) -> TokenFile:
    length, header = config.dataset.sequence_length, tokens.read_header(path)
    if config.model.kind == "decoder" and header.vocab_size > config.model.vocab_size:
        raise UsageError(
            f"{path} has tokens of a vocabulary of {header.vocab_size}, but model.vocab_size is"
            f" {config.model.vocab_size}",
            f"set model.vocab_size to {header.vocab_size}, or to a multiple of 64 above it",
        )
    if header.count < length + 1:
        raise CheckFailed(
            f"{path} has {header.count} tokens, but one sample needs {length + 1}"
            " (dataset.sequence_length + 1)"
        )
    return TokenFile(path, header, length)


# -- the user's own ---------------------------------------------------------------------------


def user_source(config: Config, split: str) -> OwnData:
    name = config.dataset.target or ""
    dataset = import_by_name.call_function("dataset", name, config.dataset.args, split=split)
    if dataset is None:
        why = ", and training.eval_* asks for an evaluation" if split == "eval" else ""
        raise UsageError(f"dataset.target ({name}) returned None for split={split!r}{why}")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"dataset.target is {name!r}, which returned {import_by_name.kind_of(dataset)}, not a"
            " dataset that has __len__ and __getitem__",
            "samples are asked for by their number, so that ranks share them and a resume is exact",
        )
    if not len(dataset):
        raise CheckFailed(
            f"dataset.target ({name}) returned a dataset without samples for {split!r}"
        )
    return OwnData(dataset, config, f"dataset.target ({name})")


class OwnData:
    """A user's dataset. If it has a method `collate`, that makes the batches."""

    def __init__(self, samples: Any, config: Config, name: str) -> None:
        self.samples, self.config, self.name = samples, config, name
        self.collate = getattr(samples, "collate", default_collate)

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: Sequence[int], position: int) -> Any:
        samples = []
        # The random numbers of the model, such as dropout, stay unchanged.
        with randomness_kept():
            for number, index in enumerate(indices, start=position):
                # The seed depends only on the position, not on rank, worker or resume.
                seed_all(self.config.training.seed, number, cpu_only=True)
                samples.append(self.samples[index])
        batch = self.collate(samples)
        check_batch(batch, self.config, self.name)
        return batch


NEEDS = {"decoder": ("inputs", "targets"), "ranking": ("sparse", "dense", "label")}


def check_batch(batch: Any, config: Config, origin: str) -> None:
    """Raise CheckFailed for a batch that does not fit a built-in model.

    On a GPU, the error would only be a failed assertion.
    """
    model, needs = config.model, NEEDS.get(config.model.kind, ())
    if needs and not (isinstance(batch, dict) and batch.keys() >= set(needs)):
        names = (
            ", ".join(map(str, batch)) if isinstance(batch, dict) else import_by_name.kind_of(batch)
        )
        raise CheckFailed(
            f"{origin} gave a batch of {names}; model.kind {model.kind!r} needs a dict of"
            f" {', '.join(needs)}"
        )
    for name in set(needs) & {"inputs", "targets", "sparse"}:
        low, high = (int(value) for value in batch[name].aminmax())
        if high >= model.vocab_size or (low < 0 and (name, low) != ("targets", IGNORED)):
            raise CheckFailed(
                f"{origin} gave {high if high >= model.vocab_size else low} among {name!r}, but"
                f" model.vocab_size is {model.vocab_size}"
            )


# -- the text of Python's own library --------------------------------------------------------------


# Reading this much takes 10 ms, and sending it to all ranks not much longer.
LARGEST_TEXT_BYTES = 4 << 20


def library_text() -> bytes:
    """Return up to 4 MiB of the .py files next to os.py, in order of their names."""
    text = b""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= LARGEST_TEXT_BYTES:
            break
    return text[:LARGEST_TEXT_BYTES]


# -- synthetic samples, which can be learned -------------------------------------------------------


STRIDES = 4


class Counting:
    """Sequences that count in steps of 1 to 4, modulo the vocabulary.

    A token has four possible successors, and only one for a model that sees the token before it.
    """

    def __init__(self, vocab_size: int, length: int, size: int) -> None:
        self.vocab_size, self.length, self.size = vocab_size, length, size
        self.name = "dataset.num_samples"

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int], position: int) -> dict[str, Tensor]:
        index = torch.tensor(indices)
        first, stride = index, 1 + index // self.vocab_size % STRIDES
        rows = first[:, None] + stride[:, None] * torch.arange(self.length + 1)
        return shift_tokens(rows % self.vocab_size)


class Clicks:
    """Features of a user and an item, with the sign of a fixed linear rule as the label."""

    def __init__(self, model: ModelConfig, size: int) -> None:
        self.model, self.size = model, size
        self.name = "dataset.num_samples"
        self.numbers = model.num_dense_features * model.dense_dim
        rule = torch.Generator().manual_seed(0)
        self.of_ids = to_unit_variance(
            torch.rand(model.sparse_features, model.vocab_size, generator=rule)
        )
        self.of_numbers = to_unit_variance(torch.rand(self.numbers, generator=rule))

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int], position: int) -> dict[str, Tensor]:
        model, many = self.model, self.model.sparse_features
        own = [torch.Generator().manual_seed(index + 1) for index in indices]
        rows = torch.stack([torch.rand(many + self.numbers, generator=each) for each in own])
        sparse, dense = (rows[:, :many] * model.vocab_size).long(), to_unit_variance(rows[:, many:])
        # Both parts of the rule have about the same weight.
        score = self.of_ids[torch.arange(many), sparse].mean(1) * many**0.5
        score += (dense * self.of_numbers).mean(1) * self.numbers**0.5
        shape = (len(indices), model.num_dense_features, model.dense_dim)
        return {"sparse": sparse, "dense": dense.view(shape), "label": (score > 0).float()}


def to_unit_variance(x: Tensor) -> Tensor:
    """Map numbers from 0 to 1 to numbers from -sqrt(3) to sqrt(3), with variance 1."""
    return (x * 2.0 - 1.0) * 3**0.5


# -- batches of them: the share of this rank, in the order of all ranks ----------------------------


# The position of a batch's first sample, and the indices of its samples.
Place = tuple[int, list[int]]


class ConfiguredSamples(Batches):
    """The config's samples as the loop's batches."""

    def __init__(self, source: Source, config: Config, ranks: Ranks) -> None:
        super().__init__(ranks)
        self.source, self.config, self.size = source, config, config.training.batch_size
        self.batch_size, self.samples = self.size, len(source)
        self.description = f"{self.samples:,} samples"

    def _loaded(self, places: Iterable[Place]) -> Iterator[Micro]:
        wanted = self.config.dataloader
        # A place stands for a whole batch, so the DataLoader does no batching.
        loader: DataLoader[Any] = DataLoader(
            Samples(self.source),
            batch_size=None,
            sampler=places,
            num_workers=wanted.num_workers,
            prefetch_factor=wanted.prefetch_factor if wanted.num_workers else None,
            pin_memory=wanted.pin_memory and torch.cuda.is_available(),
            worker_init_fn=functools.partial(ignore_signals, None),
            # Without its own generator, the loader would draw from the model's.
            generator=torch.Generator(),
        )
        return iter(loader)


class TrainingSamples(ConfiguredSamples):
    """The samples for training, epoch after epoch without an end."""

    endless = True

    def __init__(self, source: Source, config: Config, ranks: Ranks) -> None:
        super().__init__(source, config, ranks)
        training = config.training
        self.order = Order(len(source), training.seed, shuffle=config.dataset.shuffle)
        self.description += (
            f": {training.max_steps} steps of {ranks.world} ranks x"
            f" {training.gradient_accumulation} micro-batches x {self.size}"
        )

    def epoch(self, number: int, position: int = 0) -> Iterator[Micro]:
        """Return this rank's batches from a position on. Positions count over all ranks."""
        firsts = itertools.count(position + self.ranks.rank * self.size, self.round_size)
        return self._loaded((at, self.order.indices(at, self.size)) for at in firsts)


class HeldOutSamples(ConfiguredSamples):
    """The samples for evaluations, each once over all ranks.

    All ranks get equally many batches, because each takes part in every collective. A rank without
    samples left gets a batch of one sample that is not counted.
    """

    def epoch(self, number: int, position: int = 0) -> Iterator[Micro]:
        whole, first = len(self.source), self.ranks.rank * self.size
        begins = range(0, whole, self.round_size)[: self.config.training.eval_batches]
        shares = [range(whole)[begin + first :][: self.size] for begin in begins]
        drawn = self._loaded((share.start, [*share] or [0]) for share in shares)
        for batch, share in zip(drawn, shares, strict=True):
            yield batch._replace(real=bool(share))


@dataclass(frozen=True)
class Samples(Dataset[Micro]):
    """The dataset of a DataLoader worker. Each of its items is a whole batch."""

    source: Source

    def __getitem__(self, place: Place) -> Micro:
        first, ids = place
        return Micro(self.source.batch(ids, first), ids)
