"""Puts together what one call of train() asks for: its arguments, and the keys of the config.

Each of them does what it says, or is refused by its name with what to type instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.common.errors import UsageError
from orchestrator.config.parse import at_least
from orchestrator.config.schema import Config, Training, best_metric
from orchestrator.engine.core import settings, stopping
from orchestrator.engine.core.stopping import Duration, Limit, StopPolicy, TrainState
from orchestrator.engine.data.batch import Batches
from orchestrator.engine.data.sharded_loader import Shard

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


def of(
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
    limits = limits_of(training, stopping.parse("max_period", max_period))
    if epochs is None and not limits:
        raise UsageError(
            "train() has no end",
            'say epochs=, or max_period= such as "2m", "3 epochs" or "1000 steps"',
        )
    every = stopping.parse("save_every", save_every)
    saving = [*cadences(checkpoint, "steps", "seconds"), *([every] if every else [])]
    best, patience = best or checkpoint.best, patience or training.patience
    refuse_lone(best, patience, save_to)
    named = save_to or checkpoint.directory
    asks = bool(saving or best or save_to or (named and not built_in))
    at_end = checkpoint.at_end if built_in or "at_end" in set_keys else asks
    refuse_unused(keep, set_keys, asks=asks, at_end=at_end, ever=bool(saving or best))
    return Request(
        epochs=epochs,
        least=stopping.parse("min_period", min_period),
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
    if training.max_steps != settings.UNENDING:
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
