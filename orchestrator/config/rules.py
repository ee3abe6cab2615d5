"""Values that cannot both be meant: each is refused with the names of both. Called by config.py."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.config.schema import Config


def refuse(config: Config) -> None:
    what_nobody_reads(config)
    model_and_data(config)
    times(config)


def what_nobody_reads(config: Config) -> None:
    """A value that some other value leaves without a meaning is a mistake, not a detail."""
    for section in dataclasses.fields(config):
        inner = getattr(config, section.name)
        for item in dataclasses.fields(inner) if dataclasses.is_dataclass(inner) else ():
            if "only" not in item.metadata or not changed(inner, item.name):
                continue
            name, values = item.metadata["only"]
            other, key = name.split(".")
            found = getattr(getattr(config, other), key)
            if found not in values:
                wanted = " or ".join(str(value).lower() for value in values)
                raise UsageError(
                    f"{section.name}.{item.name} is set, but nothing reads it while {name} is"
                    f" {str(found).lower()}; it is for {wanted}"
                )
    if changed(config.dataloader, "prefetch_factor") and not config.dataloader.num_workers:
        raise UsageError(
            "dataloader.prefetch_factor is set, but dataloader.num_workers is 0: nobody loads in"
            " advance"
        )


def changed(section: Any, name: str) -> bool:
    """Whether somebody set it to something else than its default."""
    (item,) = (item for item in dataclasses.fields(section) if item.name == name)
    made = item.default_factory
    default = item.default if made is dataclasses.MISSING else made()
    return bool(getattr(section, name) != default)


def model_and_data(config: Config) -> None:
    model, data = config.model, config.dataset
    if model.kind == "ranking" and data.kind not in ("synthetic", "target"):
        raise UsageError(
            f"model.kind is 'ranking', which cannot learn from dataset.kind {data.kind!r}",
            "set dataset.kind to synthetic, or dataset.target to your own",
        )
    if model.kind == "ranking" and changed(data, "sequence_length"):
        raise UsageError("dataset.sequence_length is set, but model.kind is 'ranking'")
    if model.kind == "decoder" and data.kind == "library" and model.vocab_size < 256:
        raise UsageError(
            f"model.vocab_size is {model.vocab_size}, but dataset.kind 'library' is bytes, of which"
            " there are 256"
        )
    if data.eval_path and changed(data, "eval_fraction"):
        raise UsageError("dataset.eval_fraction and dataset.eval_path are both set")
    evaluates = config.training.eval_steps or config.training.eval_seconds
    if evaluates and not (data.eval_fraction or data.eval_path or data.target):
        raise UsageError("training.eval_* asks for an evaluation, but dataset.eval_fraction is 0")


def times(config: Config) -> None:
    scheduler, profiling, steps = config.scheduler, config.profiling, config.training.max_steps
    total = scheduler.total_steps or steps
    rising, falling = scheduler.warmup_steps or 0, scheduler.decay_steps or 0
    if rising + falling > total:
        raise UsageError(
            f"scheduler.warmup_steps ({rising}) and scheduler.decay_steps ({falling}) are more than"
            f" scheduler.total_steps ({total}; training.max_steps where it is not set)"
        )
    traced = profiling.wait + profiling.warmup + profiling.active
    if profiling.enabled and traced > steps:
        raise UsageError(
            f"profiling.wait + warmup + active are {traced} steps, but training.max_steps is"
            f" {steps}: the trace would never be written"
        )
