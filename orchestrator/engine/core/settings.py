"""The settings of a training: the arguments of a Trainer and of train(), and a config's keys.

Each of them does what it says, or is refused by its name with what to type instead.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchestrator.common.errors import UsageError
from orchestrator.common.text import Say, plural
from orchestrator.config import parse
from orchestrator.config.parse import at_least, one_of
from orchestrator.config.schema import SHARDED, Config, Training, best_metric
from orchestrator.engine.core.stopping import (
    Duration,
    Limit,
    StopPolicy,
    TrainState,
    parse_period,
)
from orchestrator.engine.data.batch import Batches
from orchestrator.engine.data.sharded_loader import Shard
from orchestrator.engine.models.losses import Criterion, Step
from orchestrator.engine.ranks.ranks import Ranks, free_host_memory, gather
from orchestrator.trackers.known import Tracker

OVER_RANKS = (*SHARDED, "ddp")
STRATEGIES = ("auto", *OVER_RANKS, "dp", "none")
UNENDING = 1 << 62  # steps, where nobody has said how many

# What the script has already decided by its own objects, or the launch before the script began.
OWN = "the Trainer takes"
REFUSED = {
    "launch": "it is read by master_launch, before the script starts: --set, or its --config",
    "sync": "it is read by master_launch, before the script starts: --set, or its --config",
    "nccl": "it is read by master_launch, before the script starts: --set, or its --config",
    "env": "it is read by master_launch, before the script starts: --set, or its --config",
    "model": f"{OWN} the model itself",
    "dataset": f"{OWN} your DataLoader: train(loader)",
    "dataloader": "these are arguments of your DataLoader",
    "optimizer": f"{OWN} the optimizer itself",
    "scheduler": f"{OWN} scheduler=, and warmup_steps=",
    "training.batch_size": "the batch size is that of your DataLoader",
    "training.loss": f"{OWN} loss= or step=",
    "fsdp.sharding_strategy": f"{OWN} strategy=",
    "distributed.backend": f"{OWN} backend=",
    "logging.trackers": f"{OWN} trackers=",
    "logging.tracker_options": f"{OWN} trackers=",
}


Each = float | Mapping[str, float] | None  # of all optimizers, or by their names


@dataclass(frozen=True, eq=False)
class Arguments:
    """The arguments of a Trainer, whose docstring explains each."""

    model: nn.Module | None
    optimizer: Any
    loss: Criterion | None
    models: Mapping[str, nn.Module] | None
    optimizers: Mapping[str, Any] | None
    schedulers: Mapping[str, Any] | None
    every: Mapping[str, int] | None
    step: Step | None
    metrics: Mapping[str, Criterion] | None
    strategy: str
    accumulate: int
    clip_grad_norm: Each
    ema: Each
    precision: str
    warmup_steps: int
    scale_lr: bool
    scheduler: Any
    scheduler_every: str
    find_unused_parameters: bool
    elementwise: bool
    stream: str
    seed: int
    device: str | int | torch.device | None
    backend: str | None
    trackers: Sequence[str | Tracker] | Mapping[str, Any]
    on_train_begin: Callable[[Any], Any] | None
    on_step_end: Callable[[Any], Any] | None
    on_epoch_end: Callable[[Any], Any] | None
    log_every: int | None
    weights: str | Path | None
    config: Mapping[str, Any] | None

    def __post_init__(self) -> None:
        one_of("strategy", self.strategy, STRATEGIES)
        one_of("scheduler_every", self.scheduler_every, ("step", "epoch"))
        one_of("stream", self.stream, ("dealt", "own"))
        at_least("warmup_steps", self.warmup_steps, 0)
        at_least("log_every", self.log_every, 1)

    @property
    def keys(self) -> Mapping[str, Any]:
        """The keys of config=, with the one that ema= stands for."""
        return with_average(self.config or {}, self.ema)

    def config_for(self, strategy: str) -> Config:
        """Return the engine's config with this strategy, which may have been chosen for `auto`.

        The ddp that was chosen takes models that leave out parts of themselves, as hybrid_shard
        does, at the cost of a look at the graph of each step.
        """
        chosen = self.strategy == "auto" and strategy == "ddp"
        static = self.keys.get("distributed", {}).get("static_graph")
        unused = self.find_unused_parameters or (chosen and not static)
        given = arguments(
            self.precision, self.accumulate, self.clip_grad_norm, self.seed, self.log_every
        )
        return config_of(given, strategy, unused, self.keys)


def arguments(
    precision: str, accumulate: int, clip: Each, seed: int, log_every: int | None
) -> dict[str, Any]:
    """Give the keys that the Trainer's own arguments stand for."""
    training = {"mixed_precision": precision, "gradient_accumulation": accumulate}
    training |= {"grad_clip_norm": one_for_all(clip) or 0.0, "seed": seed, "max_steps": UNENDING}
    return {"training": training, "logging": {"interval": log_every or 50}}


SAME = {  # keys, by the arguments that stand for them
    "precision": "training.mixed_precision",
    "accumulate": "training.gradient_accumulation",
    "clip_grad_norm": "training.grad_clip_norm",
    "seed": "training.seed",
    "log_every": "logging.interval",
}


def refuse_twice(given: Mapping[str, Any], keys: Mapping[str, Any]) -> None:
    """Refuse an argument of a Trainer beside a key of config= that says something else."""
    usual = arguments("fp32", 1, None, 0, None)
    for argument, name in SAME.items():
        section, key = name.split(".")
        value, inner = given[section].get(key), keys.get(section, {})
        if value != usual[section][key]:
            refuse_other(argument, value, name, inner.get(key, value))


def refuse_other(argument: str, value: Any, name: str, of_key: Any) -> None:
    if of_key != value:
        raise UsageError(
            f"{argument}={value!r} and config= with {name} {of_key!r} contradict each other",
            f"leave one of them out: {argument}= is the same as {name}",
        )


OF_SEVERAL_RANKS = ("fsdp", "distributed")
OF_ANY = ("fsdp.wrap", "distributed.timeout")


def refuse_unspread(strategy: str, unused: bool, keys: Mapping[str, Any]) -> None:
    """Refuse what says how a model is spread over ranks, if it is not."""
    if strategy not in ("dp", "none"):
        return
    named = [f"{name}.{key}" for name in OF_SEVERAL_RANKS for key in keys.get(name, {})]
    named = ["find_unused_parameters="] * unused + [key for key in named if key not in OF_ANY]
    if named:
        raise UsageError(
            f"{named[0]} says how a model is spread over ranks, and strategy={strategy!r} spreads"
            " none",
            f'leave it out, or say strategy="ddp" ({" or ".join(SHARDED)} for keys of fsdp)',
        )


def one_for_all(value: Each) -> float | None:
    return None if isinstance(value, Mapping) else value


def with_average(keys: Mapping[str, Any], ema: Each) -> Mapping[str, Any]:
    """Give the keys of config= with what the argument ema= stands for."""
    if one_for_all(ema) is None:
        return keys
    inner = keys.get("training", {})
    refuse_other("ema", ema, "training.ema", inner.get("ema", ema))
    return {**keys, "training": {**inner, "ema": ema}}


def refuse_unread(keys: Mapping[str, Any]) -> None:
    """Refuse by name what a Trainer does not read: a key that is accepted is honoured."""
    for section, values in keys.items():
        if section not in REFUSED and not isinstance(values, Mapping):
            raise UsageError(f"config[{section!r}] must hold keys, not {values!r}")
        inner = values if isinstance(values, Mapping) else {}
        for name in [section, *(f"{section}.{key}" for key in inner)]:
            if name in REFUSED:
                first = next(iter(inner), None)
                shown = f"{name}.{first}" if name == section and first else name
                raise UsageError(f"config: a Trainer does not read {shown}", REFUSED[name])


def config_of(
    given: Mapping[str, Any], strategy: str, find_unused: bool, keys: Mapping[str, Any]
) -> Config:
    """Make the engine's config of the Trainer's arguments and the keys of its config=."""
    refuse_unread(keys)
    refuse_twice(given, keys)
    refuse_unspread(strategy, find_unused, keys)
    merged: dict[str, Any] = copy.deepcopy(dict(given))
    if strategy == "auto" and "fsdp" in keys:
        strategy = "hybrid_shard"  # the only one of the two that reads them
    merged["fsdp"] = {"sharding_strategy": strategy if strategy in OVER_RANKS else "ddp"}
    merged["distributed"] = {"find_unused_parameters": find_unused}
    for section, values in keys.items():
        merged.setdefault(section, {}).update(values)
    return parse.build(Config, merged)


def of_launch() -> Config | None:
    """Read what the launch resolved, from the run directory on this node; by hand there is none."""
    run = os.environ.get("ORCHESTRATOR_RUN")
    if not run:
        return None
    spec = json.loads(Path(run, "spec.json").read_text(encoding="ascii"))
    return parse.build(Config, spec["config"])


def make_deterministic(config: Config) -> None:
    """Honour training.deterministic, before anything is computed."""
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


# -- the strategy, where the user has named none ---------------------------------------------------


SHARE = 0.5  # of a device's memory; the rest is for activations, and for what others hold
TRAINED = 4  # weights, gradients and two moments, as large as each other


def choose(model: nn.Module, ranks: Ranks, keys: Mapping[str, Any]) -> tuple[str, str]:
    """Return the strategy, the same on all ranks, and a sentence that says why."""
    if "fsdp" in keys:
        return "hybrid_shard", "strategy: hybrid_shard, because config= has keys of fsdp"
    trained = TRAINED + bool(keys.get("training", {}).get("ema"))
    needed = sum(p.nbytes * (trained if p.requires_grad else 1) for p in model.parameters())
    needed += sum(buffer.nbytes for buffer in model.buffers())
    memory = min(gather(memory_of(ranks)))
    less = "less than 0.1" if needed < 1e8 else f"{needed / 1e9:,.1f}"
    sizes = f"it needs {less} of a device's {memory / 1e9:,.1f} GB"
    if needed <= memory * SHARE:
        return "ddp", f"strategy: ddp, the fastest for a model that fits: {sizes}"
    return "hybrid_shard", f"strategy: hybrid_shard, since a whole copy is too large: {sizes}"


def memory_of(ranks: Ranks) -> int:
    """Return the bytes of this rank's GPU, or its part of the host's memory that is free."""
    if ranks.device.type == "cuda":
        return int(torch.cuda.get_device_properties(ranks.device).total_memory)
    return free_host_memory() // len(ranks.neighbours)


# -- the batch of a job that goes on with another number of ranks ----------------------------------


VARIABLE = "ORCHESTRATOR_FIRST_WORLD_SIZE"


@dataclass(frozen=True)
class Share:
    """The part of each step that every rank works off."""

    accumulation: int  # micro-batches
    batch_size: int | None  # samples in each; None: the user's own loader decides


def share(first: int, world: int, accumulation: int, batch_size: int | None) -> Share:
    """Divide the step of `first` ranks among `world`: equal where it divides, else the nearest.

    Micro-batches are made smaller where their number does not divide, never larger: they have to
    fit into the memory of a device.
    """
    micros = first * accumulation
    if micros % world == 0:
        return Share(micros // world, batch_size)
    if batch_size is not None and micros * batch_size % world == 0:
        samples = micros * batch_size // world  # samples of a rank
        size = max(size for size in range(1, batch_size + 1) if samples % size == 0)
        if samples // size <= 2 * -(
            -samples // batch_size
        ):  # 13 micro-batches of one sample are no gain
            return Share(samples // size, size)
    if batch_size is None:
        return Share(max(1, round(micros / world)), None)
    ideal = micros * batch_size / world
    counts = {max(1, math.floor(ideal / batch_size)), math.ceil(ideal / batch_size)}
    shares = [Share(n, min(batch_size, max(1, round(ideal / n)))) for n in sorted(counts)]
    return min(shares, key=lambda one: abs(one.accumulation * (one.batch_size or 1) - ideal))


def first_world(world: int) -> int:
    """Return with how many ranks the first attempt of this job began."""
    value = os.environ.get(VARIABLE, "")
    return int(value) if value.isdecimal() and int(value) else world


def keep_batch(config: Config, world: int, say: Say, *, loader: bool) -> Config:
    """Return the config for this number of ranks, and say what a step is made of if it is another.

    `loader`: the batches are those of a user's own DataLoader.
    """
    first, training = first_world(world), config.training
    if first == world:
        return config
    size = None if loader else training.batch_size
    share_now = share(first, world, training.gradient_accumulation, size)
    say(in_words(first, world, training.gradient_accumulation, size, share_now))
    changed = dataclasses.replace(training, gradient_accumulation=share_now.accumulation)
    if share_now.batch_size is not None:
        changed = dataclasses.replace(changed, batch_size=share_now.batch_size)
    if training.eval_batches is not None:  # an evaluation, too, sees as many samples
        samples = training.eval_batches * first * (size or 1)
        batches = max(1, round(samples / (world * (share_now.batch_size or 1))))
        changed = dataclasses.replace(changed, eval_batches=batches)
    return dataclasses.replace(config, training=changed)


def in_words(first: int, world: int, accumulation: int, size: int | None, share_now: Share) -> str:
    """Say how many samples a step has now, or micro-batches where nobody knows their size."""
    what = "micro-batches" if size is None else "samples"
    before = first * accumulation * (size or 1)
    now = world * share_now.accumulation * (share_now.batch_size or 1)
    micros = f"{share_now.accumulation} micro-batch{'' if share_now.accumulation == 1 else 'es'}"
    micros += "" if share_now.batch_size is None else f" of {share_now.batch_size}"
    ranks = f"{plural(world, 'rank')} in place of {first}"
    if now == before:
        return f"{ranks}: a step keeps its {before} {what}, {micros} on each rank"
    return (
        f"WARNING: {ranks} cannot share the {before} {what} of a step equally: a step has {now}"
        f" from now on, {micros} on each rank"
    )


# -- what train() is asked for -------------------------------------------------------------------


WAYS = "say save_to=DIR (at the end, and when stopped), save_every= or best="
OF_SAVING = ("keep", "asynchronous", "at_end")  # keys that say how it saves


@dataclass(frozen=True)
class Request:
    """All that a training is to do, as far as it is known before there are data."""

    epochs: int | None
    least: Duration | None  # that it lasts, whatever ends it
    limits: list[Limit]
    saving: list[Duration]  # how often
    evaluating: list[Duration]
    best: str | None  # metric
    patience: int | None
    directory: str | Path | None  # that somebody has named
    keep: int  # checkpoints
    resume: str  # never, auto, or from what
    asks_to_save: bool  # by a place, a time or a metric
    saves: bool
    at_end: bool

    def policy(self, state: TrainState) -> StopPolicy:
        return StopPolicy(
            state, epochs=self.epochs, least=self.least, limits=self.limits, saving=self.saving,
            evaluating=self.evaluating, best=self.best, patience=self.patience,
        )  # fmt: skip


def request_of(
    config: Config,
    keys: Mapping[str, Any],
    built_in: bool,
    *,
    epochs: int | None,
    min_period: str | None,
    max_period: str | None,
    save_every: str | None,
    best: str | None,
    patience: int | None,
    save_to: str | Path | None,
    keep: int | None,
    resume: bool,
) -> Request:
    """Put arguments and keys together. `keys`: those that the program has set; a Trainer saves for
    no other reason than what somebody has said, the built-in engine by its config alone."""
    at_least("epochs", epochs, 1)
    at_least("patience", patience, 1)
    at_least("keep", keep, 1)
    checkpoint, training = config.checkpoint, config.training
    set_keys = keys.get("checkpoint", {})
    limits = limits_of(training, parse_period("max_period", max_period))
    if epochs is None and not limits:
        raise UsageError(
            "train() has no end",
            'say epochs=, or max_period= such as "2m", "3 epochs" or "1000 steps"',
        )
    every = parse_period("save_every", save_every)
    saving = [*cadences(checkpoint, "steps", "seconds"), *([every] if every else [])]
    best, patience = best or checkpoint.best, patience or training.patience
    refuse_lone(best, patience, save_to)
    named = save_to or checkpoint.directory
    asks = bool(saving or best or save_to or (named and not built_in))
    at_end = checkpoint.at_end if built_in or "at_end" in set_keys else asks
    refuse_unused(keep, set_keys, asks=asks, at_end=at_end, ever=bool(saving or best))
    return Request(
        epochs=epochs,
        least=parse_period("min_period", min_period),
        limits=limits,
        saving=saving,
        evaluating=cadences(training, "eval_steps", "eval_seconds"),
        best=best,
        patience=patience,
        directory=named,
        keep=keep or checkpoint.keep,
        resume="auto" if resume else checkpoint.resume,
        asks_to_save=asks,
        saves=asks or at_end,
        at_end=at_end,
    )


def refuse_lone(best: str | None, patience: int | None, save_to: str | Path | None) -> None:
    """Refuse what is no answer by itself."""
    if best is not None:
        best_metric("best", best)
    if save_to is not None and not str(save_to):
        raise UsageError("save_to= is empty", "name a directory, or leave it out")
    if patience and not best:
        raise UsageError(
            "patience= counts how often no better value came, but no metric is named",
            'best="min val_loss" or best="max val_accuracy" (checkpoint.best) names it',
        )


def refuse_unused(
    keep: int | None, keys: Mapping[str, Any], *, asks: bool, at_end: bool, ever: bool
) -> None:
    """Refuse what says how to save, if nothing is ever saved."""
    if asks and not at_end and not ever:
        raise UsageError(
            "a place for checkpoints is named, but checkpoint.at_end is false, and nothing says"
            " when else to save",
            "leave at_end out, or say save_every= or best=",
        )
    if asks or at_end:
        return
    if keep is not None:
        raise UsageError(
            f"keep={keep} says how many checkpoints stay, but none is saved",
            f"{WAYS}; or leave keep= out",
        )
    for name in OF_SAVING:
        if name in keys:
            raise UsageError(
                f"checkpoint.{name} says how checkpoints are saved, but none is",
                f"{WAYS}; or leave it out",
            )


def limits_of(training: Training, most: Duration | None) -> list[Limit]:
    limits = [Limit(most, "max_period is over")] if most else []
    if training.max_steps != UNENDING:
        steps = Duration(training.max_steps, "steps")
        limits.append(Limit(steps, f"training.max_steps ({training.max_steps}) is reached"))
    if minutes := training.max_minutes:
        reason = f"training.max_minutes ({minutes:g}) are over"
        limits.append(Limit(Duration(minutes * 60, "seconds"), reason))
    return limits


def cadences(section: Any, steps: str, seconds: str) -> list[Duration]:
    wanted = {"steps": getattr(section, steps), "seconds": getattr(section, seconds)}
    return [Duration(amount, unit) for unit, amount in wanted.items() if amount]


# -- and the data that it is given ----------------------------------------------------------------


def refuse_spent(asked: Request, train_loader: Any, val_loader: Any) -> None:
    """Refuse a generator that is empty when it is asked a second time."""
    refused = {"val_loader": val_loader if asked.epochs != 1 or asked.evaluating else None}
    if asked.epochs != 1 and not asked.limits:
        refused["train_loader"] = train_loader
    for name, loader in refused.items():
        if isinstance(loader, Iterator):
            raise UsageError(
                f"{name} is a {type(loader).__name__}, which gives its batches only once, and"
                " every epoch asks for them",
                "give a DataLoader, a list, or an object whose __iter__ starts from the beginning",
            )


def refuse_unfit(asked: Request, training: Batches, held_out: Batches | None, stream: str) -> None:
    """Refuse what these data cannot answer."""
    if asked.evaluating and held_out is None:
        raise UsageError("training.eval_* asks for an evaluation", "give train() a val_loader")
    periods = [asked.least, *asked.saving, *(limit.most for limit in asked.limits)]
    by_epoch = asked.epochs or any(period and period.unit == "epochs" for period in periods)
    if training.endless and by_epoch:
        raise UsageError(
            "the data of a config go on without a count of epochs, and train() is told epochs",
            'say it in steps or in time: max_period="1000 steps"',
        )
    shards = [data for data in (training, held_out) if isinstance(data, Shard)]
    if stream == "own" and shards and not any(shard.may_be_own for shard in shards):
        raise UsageError(
            'stream="own" is for data that come to each rank as its own part; here the Trainer'
            f" itself deals them out ({shards[0].description})",
            'leave stream="own" out',
        )
