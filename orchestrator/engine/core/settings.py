"""Turn the arguments of a Trainer and of train(), and a config's keys, into settings.

An unsupported argument or key is refused by name, with a fix.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch

from orchestrator.common.errors import UsageError
from orchestrator.common.text import Say, plural
from orchestrator.config import parse
from orchestrator.config.parse import check_bounds, check_one_of
from orchestrator.config.schema import SHARDED, Config, TrainingConfig, best_metric
from orchestrator.engine.core.stopping import Duration, Limit, TrainingRequest, parse_period
from orchestrator.engine.data.batch import Batches
from orchestrator.engine.data.sharded_loader import Shard
from orchestrator.engine.models.losses import Criterion, Step
from orchestrator.trackers.known import Tracker

OVER_RANKS = (*SHARDED, "ddp")
STRATEGIES = (*OVER_RANKS, "dp", "none")
# The number of steps where no limit is set.
UNENDING = 1 << 62

# Keys that a Trainer refuses: the script's own objects, or the launch before it, decide them.
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
    "training.mixed_precision": f"{OWN} precision=",
    "training.gradient_accumulation": f"{OWN} accumulate=",
    "training.grad_clip_norm": f"{OWN} clip_grad_norm=",
    "training.ema": f"{OWN} ema=",
    "training.seed": f"{OWN} seed=",
    "fsdp.sharding_strategy": f"{OWN} strategy=",
    "distributed.backend": f"{OWN} backend=",
    "logging.trackers": f"{OWN} trackers=",
    "logging.tracker_options": f"{OWN} trackers=",
}


# One value for all optimizers, or values by their names.
Each = float | Mapping[str, float] | None


Hook = Callable[[Any], Any]


@dataclass(eq=False, repr=False)
class TrainerSettings:
    """The arguments of a Trainer.

    Arguments:
        model: the plain model. All ranks start with rank 0's weights.
        optimizer: a torch optimizer over the model's parameters; a list of several that share the
            loss, such as [Muon(matrices), AdamW(others)]; or a function of the parameters.
        models: several models by name, instead of `model`.
        optimizers: optimizers by name; each minimises the loss of its name that
            step(models, batch) returns.
        schedulers: schedulers by the names of their optimizers.
        every: intervals of optimizers that step less often, by name: {"G": 5} steps G in steps 5,
            10, 15 and so on.
        loss: called with (outputs, targets) of a batch (inputs, targets); returns the mean over the
            samples, or (sum, count).
        step: called with (model, batch), instead of `loss`; returns the same, or
            (sum, count, {name: sum}) with further metrics.
        metrics: functions of (outputs, targets) by name, with the same results as `loss`.
        strategy: "ddp"; "hybrid_shard", "full_shard" or "shard_grad_op" for a model that is too
            large for one device; for a single process also "dp" or "none".
        accumulate: the number of micro-batches per step.
        clip_grad_norm: the largest norm of the whole gradient; None disables clipping. With several
            optimizers, a dict by their names, or one number for each. The same holds for `ema`.
        ema: the decay of an exponential moving average of the weights, such as 0.999. The average
            is evaluated in place of the weights, and saved beside them.
        precision: "fp32", "bf16" or "fp16", for the computation; weights keep their dtype.
        warmup_steps: the steps over which learning rates rise linearly from zero.
        scale_lr: multiply the learning rates by the number of ranks at the start of the job.
        scheduler: a torch scheduler over the optimizer, or a function of the optimizer.
        scheduler_every: "step" or "epoch".
        find_unused_parameters: for ddp, if the model does not use all parameters in every step.
        elementwise: declare that an optimizer of your own updates each element by itself, so that
            its parameters may be sharded.
        stream: "dealt" if every rank's IterableDataset yields all samples, "own" if it yields only
            this rank's part.
        seed: seeds the order of the samples and all randomness.
        device: the device of a single process. With several, each has its own.
        backend: "nccl", "gloo" or "mpi"; the default is nccl where there are GPUs.
        trackers: "tensorboard", "wandb", "mlflow", or objects with log(values, step) and
            close().
        on_train_begin: called with the Trainer before the first step.
        on_step_end: called with the Trainer after every step.
        on_epoch_end: called with the Trainer after every epoch. If any of these hooks returns True
            on any rank, the training ends there on all ranks.
        log_every: the steps between two lines of progress and metrics; the default is 50.
        weights: a .safetensors file, or a directory of them in Hugging Face's layout. Each rank
            reads only its part, so the model may be made on the meta device.
        config: further keys of docs/config.md, such as {"compile": {"enabled": True}}. A key that
            does not concern a Trainer is refused.
    """

    model: Any = None
    optimizer: Any = None
    loss: Criterion | None = None
    _: KW_ONLY
    models: Any = None
    optimizers: Any = None
    schedulers: Mapping[str, Any] | None = None
    every: Mapping[str, int] | None = None
    step: Step | None = None
    metrics: Mapping[str, Criterion] | None = None
    strategy: str = "ddp"
    accumulate: int = 1
    clip_grad_norm: Each = None
    ema: Each = None
    precision: str = "fp32"
    warmup_steps: int = 0
    scale_lr: bool = False
    scheduler: Any = None
    scheduler_every: str = "step"
    find_unused_parameters: bool = False
    elementwise: bool = False
    stream: str = "dealt"
    seed: int = 0
    device: str | int | torch.device | None = None
    backend: str | None = None
    trackers: Sequence[str | Tracker] | Mapping[str, Any] = ()
    on_train_begin: Hook | None = None
    on_step_end: Hook | None = None
    on_epoch_end: Hook | None = None
    log_every: int | None = None
    weights: str | Path | None = None
    config: Mapping[str, Any] | None = None


def trainer_config(given: TrainerSettings) -> Config:
    """Return the engine's config for a Trainer's arguments."""
    keys = given.config or {}
    refuse_unread(keys)
    check_bounds("log_every", given.log_every, least=1)
    strategy = given.strategy
    if strategy == "auto":
        raise UsageError(
            'strategy="auto" was removed',
            'leave it out for "ddp", or pass "hybrid_shard" if a device is too small for the model',
        )
    check_one_of("strategy", strategy, STRATEGIES)
    merged: dict[str, Any] = {
        "training": {
            "mixed_precision": given.precision,
            "gradient_accumulation": given.accumulate,
            "grad_clip_norm": one_for_all(given.clip_grad_norm) or 0.0,
            "ema": one_for_all(given.ema),
            "seed": given.seed,
            "max_steps": UNENDING,
        },
        "logging": {"interval": given.log_every or 50},
        "fsdp": {"sharding_strategy": strategy if strategy in OVER_RANKS else "ddp"},
        "distributed": {"find_unused_parameters": given.find_unused_parameters},
    }
    for section, values in keys.items():
        merged[section] = {**merged.get(section, {}), **values}
    return parse.build_dataclass(Config, merged)


def one_for_all(value: Each) -> float | None:
    return None if isinstance(value, Mapping) else value


def refuse_unread(keys: Mapping[str, Any]) -> None:
    """Refuse keys that a Trainer does not read, by name, so that none is silently ignored."""
    for section, values in keys.items():
        if section not in REFUSED and not isinstance(values, Mapping):
            raise UsageError(f"config[{section!r}] must hold keys, not {values!r}")
        inner = values if isinstance(values, Mapping) else {}
        for name in [section, *(f"{section}.{key}" for key in inner)]:
            if name in REFUSED:
                first = next(iter(inner), None)
                shown = f"{name}.{first}" if name == section and first else name
                raise UsageError(f"config: a Trainer does not read {shown}", REFUSED[name])


def config_of_launch() -> Config | None:
    """Return the config that the launch resolved, or None if torchrun was started by hand.

    It is read from the run directory on this node.
    """
    run = os.environ.get("ORCHESTRATOR_RUN")
    if not run:
        return None
    spec = json.loads(Path(run, "spec.json").read_text(encoding="ascii"))
    return parse.build_dataclass(Config, spec["config"])


def outputs_directory() -> Path | None:
    """Return the directory for the experiment's results; torchrun by hand has none."""
    experiment = os.environ.get("ORCHESTRATOR_EXPERIMENT")
    return Path(experiment, "outputs") if experiment else None


def make_deterministic(config: Config) -> None:
    """Apply training.deterministic. Call it before anything is computed."""
    if config.training.deterministic:
        # cuBLAS reads this when CUDA starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


# -- the batch after a restart with another number of ranks ----------------------------------------


# The number of ranks in the first attempt of this job.
VARIABLE = "ORCHESTRATOR_FIRST_WORLD_SIZE"


def keep_batch(config: Config, world: int, say: Say) -> Config:
    """Return the config for another number of ranks than at first, with the same batch per step.

    The micro-batches per rank change, and the batches of an evaluation.
    """
    value, training = os.environ.get(VARIABLE, ""), config.training
    first = int(value) if value.isdecimal() and int(value) else world
    if first == world:
        return config
    before = first * training.gradient_accumulation
    micros = max(1, round(before / world))
    what = f"{plural(world, 'rank')} in place of {first}: a step has {micros} micro-batches of each"
    equal = micros * world == before
    say(
        f"{what}, {before} as before"
        if equal
        else f"WARNING: {what}, {micros * world} and not {before} as before"
    )
    changed = dataclasses.replace(training, gradient_accumulation=micros)
    if training.eval_batches is not None:
        # All ranks together evaluate as many samples as before.
        batches = max(1, round(training.eval_batches * first / world))
        changed = dataclasses.replace(changed, eval_batches=batches)
    return dataclasses.replace(config, training=changed)


# -- the arguments of train() --------------------------------------------------------------------


def request_of(
    config: Config,
    keys: Mapping[str, Any],
    *,
    built_in: bool = False,
    epochs: int | None = None,
    min_period: str | None = None,
    max_period: str | None = None,
    save_every: str | None = None,
    best: str | None = None,
    patience: int | None = None,
    save_to: str | Path | None = None,
    keep: int | None = None,
    resume: bool = False,
) -> TrainingRequest:
    """Return the request of a train() call, from its arguments and the config.

    `keys` holds the config keys that the program has set itself. A Trainer saves at the end only if
    an argument or such a key asks for checkpoints; the built-in engine follows its config.
    """
    check_bounds("epochs", epochs, least=1)
    check_bounds("patience", patience, least=1)
    check_bounds("keep", keep, least=1)
    checkpoint, training = config.checkpoint, config.training
    set_keys = keys.get("checkpoint", {})
    limits = limits_of(training, parse_period("max_period", max_period))
    if epochs is None and not limits:
        raise UsageError(
            "train() has no end",
            'pass epochs=, or max_period= such as "2m", "3 epochs" or "1000 steps"',
        )
    every = parse_period("save_every", save_every)
    saving = [*parse_cadences(checkpoint, "steps", "seconds"), *([every] if every else [])]
    best, patience = best or checkpoint.best, patience or training.patience
    named = save_to or checkpoint.directory
    asks = bool(saving or best or save_to or (named and not built_in))
    by_config = "at_end" in set_keys or (built_in and (asks or named or outputs_directory()))
    at_end = checkpoint.at_end if by_config else asks
    refuse_lone(best, patience, keep, saves=asks or at_end)
    return TrainingRequest(
        epochs=epochs,
        least=parse_period("min_period", min_period),
        limits=limits,
        saving=saving,
        evaluating=parse_cadences(training, "eval_steps", "eval_seconds"),
        best=best,
        patience=patience,
        directory=named,
        keep=keep or checkpoint.keep,
        resume="auto" if resume else checkpoint.resume,
        asks_to_save=asks,
        saves=asks or at_end,
        at_end=at_end,
    )


def refuse_lone(best: str | None, patience: int | None, keep: int | None, *, saves: bool) -> None:
    """Refuse patience= without best=, and keep= if no checkpoint is saved."""
    if best is not None:
        best_metric("best", best)
    if patience and not best:
        raise UsageError(
            "patience= counts how often no better value came, but no metric is named",
            'best="min val_loss" or best="max val_accuracy" (checkpoint.best) names it',
        )
    if keep is not None and not saves:
        raise UsageError(
            f"keep={keep} says how many checkpoints stay, but none is saved",
            "pass save_to=DIR (at the end, and when stopped), save_every= or best=",
        )


def limits_of(training: TrainingConfig, most: Duration | None) -> list[Limit]:
    limits = [Limit(most, "max_period is over")] if most else []
    if training.max_steps != UNENDING:
        limits.append(
            Limit(
                Duration(training.max_steps, "steps"),
                f"training.max_steps ({training.max_steps}) is reached",
            )
        )
    if minutes := training.max_minutes:
        limits.append(
            Limit(Duration(minutes * 60, "seconds"), f"training.max_minutes ({minutes:g}) are over")
        )
    return limits


def parse_cadences(section: Any, steps: str, seconds: str) -> list[Duration]:
    wanted = {"steps": getattr(section, steps), "seconds": getattr(section, seconds)}
    return [Duration(amount, unit) for unit, amount in wanted.items() if amount]


# -- the data of train() --------------------------------------------------------------------------


# The data for training, and those that are held out.
Data = tuple[Batches | None, Batches | None]


def data_of(
    asked: TrainingRequest, own: Data, given: tuple[Any, Any], share: Callable[[Any, str], Shard]
) -> tuple[Batches, Batches | None]:
    """Return this rank's share of the loaders given to train(), else the Trainer's `own` data."""
    training, held_out = own
    if given[0] is None and training is None:
        raise UsageError("train() has no data", "give it a DataLoader: train(loader, epochs=1)")
    refuse_spent(asked, *given)
    if given[0] is not None:
        training = share(given[0], "train_loader")
    if given[1] is not None:
        held_out = share(given[1], "val_loader")
    assert training is not None
    refuse_unfit(asked, training, held_out)
    return training, held_out


def refuse_spent(asked: TrainingRequest, train_loader: Any, val_loader: Any) -> None:
    """Refuse a generator as data that is read more than once, because it can only be read once."""
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


def refuse_unfit(asked: TrainingRequest, training: Batches, held_out: Batches | None) -> None:
    """Refuse a request that does not fit its data: evaluations or epochs."""
    if asked.evaluating and held_out is None:
        raise UsageError("training.eval_* asks for an evaluation", "give train() a val_loader")
    periods = [asked.least, *asked.saving, *(limit.most for limit in asked.limits)]
    by_epoch = asked.epochs or any(period and period.unit == "epochs" for period in periods)
    if training.endless and by_epoch:
        raise UsageError(
            "the data of a config go on without a count of epochs, and train() is told epochs",
            'give it in steps or in time: max_period="1000 steps"',
        )
