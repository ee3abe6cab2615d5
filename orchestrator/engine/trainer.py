"""Define orchestrator.Trainer, which trains a model on any number of ranks.

The same object runs in a notebook, in `python script.py`, under torchrun and under master_launch.
core/parts.py builds its parts from arguments or from a config, core/loop.py trains,
core/checkpointing.py saves and resumes, observe/reporter.py reports.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchestrator.common.errors import UsageError
from orchestrator.config.schema import Config
from orchestrator.engine.core import parts, settings
from orchestrator.engine.core.checkpointing import Checkpointing
from orchestrator.engine.core.loop import Hooks, evaluate_model, loop_of
from orchestrator.engine.core.optimizer import Factory
from orchestrator.engine.core.parts import Parts, as_path
from orchestrator.engine.core.stopping import Metrics, StopPolicy, TrainingRequest, TrainState
from orchestrator.engine.data import sharded_loader, sources
from orchestrator.engine.data.batch import Batches
from orchestrator.engine.data.sources import HeldOutSamples, TrainingSamples
from orchestrator.engine.models.losses import Criterion, Losses, Step
from orchestrator.engine.observe.reporter import Reporting
from orchestrator.engine.ranks import spawn
from orchestrator.engine.ranks.randomness import randomness_kept
from orchestrator.engine.ranks.ranks import Ranks
from orchestrator.engine.saving import weights as whole_weights
from orchestrator.engine.sharding.blocks import Models
from orchestrator.trackers.known import Tracker

Hook = Callable[["Trainer"], Any]


class Trainer:
    """Train a model on one process, or on many processes of many machines.

        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
        trainer = Trainer(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            loss=nn.CrossEntropyLoss(),
        )
        trainer.train(train_loader, val_loader, epochs=3, save_every="1 epoch", resume=True)
        print(trainer.state.val_metrics)

    The results equal those of a plain loop on one process with the batch of all ranks together.
    `trainer.state` holds the progress: step, epoch, train_metrics, val_metrics, history, and why
    the training ended. See docs/trainer.md for details.

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

    # The data that a config names, and the keys of config=.
    _data: tuple[Batches | None, Batches | None] = None, None
    _keys: Mapping[str, Any] = {}
    _stream = "dealt"
    _hooks: tuple[Hook | None, ...] = ()
    # This is only set while train() runs.
    _policy: StopPolicy | None = None

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Factory | None = None,
        loss: Criterion | None = None,
        *,
        models: Mapping[str, nn.Module] | None = None,
        optimizers: Mapping[str, Any] | None = None,
        schedulers: Mapping[str, Any] | None = None,
        every: Mapping[str, int] | None = None,
        step: Step | None = None,
        metrics: Mapping[str, Criterion] | None = None,
        strategy: str = "ddp",
        accumulate: int = 1,
        clip_grad_norm: settings.Each = None,
        ema: settings.Each = None,
        precision: str = "fp32",
        warmup_steps: int = 0,
        scale_lr: bool = False,
        scheduler: Any = None,
        scheduler_every: str = "step",
        find_unused_parameters: bool = False,
        elementwise: bool = False,
        stream: str = "dealt",
        seed: int = 0,
        device: str | int | torch.device | None = None,
        backend: str | None = None,
        trackers: Sequence[str | Tracker] | Mapping[str, Any] = (),
        on_train_begin: Hook | None = None,
        on_step_end: Hook | None = None,
        on_epoch_end: Hook | None = None,
        log_every: int | None = None,
        weights: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        trained = parts.trained_of(model, optimizer, scheduler, models, optimizers, schedulers)
        losses = Losses(loss, step, metrics or {}, [*trained.optimizers])
        self._keys, self._stream = config or {}, stream
        resolved = settings.trainer_config(
            self._keys, strategy, precision, accumulate, clip_grad_norm, ema, seed, log_every,
            find_unused_parameters,
        )  # fmt: skip
        made = parts.of_trained(
            trained, losses, resolved, parts.joined(resolved, backend, device), strategy=strategy,
            every=every or {}, clip_grad_norm=clip_grad_norm, ema=ema, elementwise=elementwise,
            scheduler_every=scheduler_every, warmup_steps=warmup_steps, scale_lr=scale_lr,
            weights=weights,
        )  # fmt: skip
        self._assemble(made, trackers)
        self._hooks = on_train_begin, on_step_end, on_epoch_end

    @classmethod
    def from_config(cls, config: Config, everyone: Ranks) -> Trainer:
        """Return a Trainer with the model, optimizer and data of a config."""
        trainer = cls.__new__(cls)
        made = parts.of_config(config, everyone)
        train, held_out = sources.sources(made.config)
        trainer._data = (
            TrainingSamples(train, made.config, everyone),
            HeldOutSamples(held_out, made.config, everyone) if held_out is not None else None,
        )
        logging = made.config.logging
        wanted = {name: logging.tracker_options.get(name) for name in logging.trackers}
        trainer._assemble(made, wanted)
        return trainer

    def _assemble(self, made: Parts, trackers: Any) -> None:
        self.parts, self.config, self.ranks, self.mesh = made, made.config, made.ranks, made.mesh
        self.bare, self.model = made.bare, made.model
        self.models = dict(self.bare) if isinstance(self.bare, Models) else {"": self.bare}
        self.optimizers = {stepper.name: stepper.optimizer for stepper in made.steppers}
        self.optimizer = made.steppers.first.optimizer
        self._reporting = Reporting(made.ranks, trackers)
        self._saving = Checkpointing(made, self._reporting.say, built_in=self._data[0] is not None)

    @property
    def state(self) -> TrainState:
        """The progress of the training."""
        return self._saving.state

    @staticmethod
    def launch(
        fn: Callable[..., Any], args: Sequence[Any] = (), nprocs: int | None = None
    ) -> list[Any]:
        """Run fn(rank, world_size, *args) in `nprocs` processes on this machine.

        Returns their results by rank. An exception of a rank is raised here.
        """
        return spawn.launch(fn, args, nprocs)

    # -- training -----------------------------------------------------------------------------

    def train(
        self,
        train_loader: Any = None,
        val_loader: Any = None,
        epochs: int | None = None,
        *,
        min_period: str | None = None,
        max_period: str | None = None,
        save_every: str | None = None,
        best: str | None = None,
        patience: int | None = None,
        save_to: str | Path | None = None,
        keep: int | None = None,
        resume: bool = False,
        verbose: bool = True,
    ) -> list[Metrics]:
        """Train until `epochs` are done, but at least min_period and at most max_period.

        Returns `state.history`, one entry per epoch. Epochs and steps count from the very first
        start, even after a resume; seconds count from this call.

        Arguments:
            train_loader: a DataLoader, or any iterable of batches. A Trainer that was made from a
                config has its own.
            val_loader: held-out data, evaluated after every epoch.
            epochs: the number of epochs after which the training ends.
            min_period: the shortest duration, such as "30s", "2m", "3 epochs", "1000 steps".
            max_period: the longest duration, which overrides all other arguments.
            save_every: the interval between checkpoints; the last state is saved as well.
            best: also save and keep the best checkpoint by a metric: "min val_loss",
                "max val_accuracy".
            patience: the number of epochs without a better metric after which the training ends.
            save_to: the directory for checkpoints; the default is the experiment's
                outputs/checkpoints, or ./checkpoints. Without save_every, the state is saved at the
                end and when the training is stopped.
            keep: the number of checkpoints to keep; the default is 3.
            resume: continue from the newest checkpoint that verifies, if there is one.
            verbose: False prints nothing.
        """
        self._reporting.quiet = not verbose
        asked = settings.request_of(
            self.config, self._keys, self._saving.built_in, epochs=epochs,
            min_period=min_period, max_period=max_period, save_every=save_every, best=best,
            patience=patience, save_to=save_to, keep=keep, resume=resume,
        )  # fmt: skip
        training, held_out = self._batches(asked, train_loader, val_loader)
        self._saving.begin(asked, training)
        policy = StopPolicy(self.state, asked)
        self._reporting.say(f"training on {training.description}")
        self._saving.say_where()
        if policy.nothing_to_do():
            self._saving.end_with_nothing_done()
        else:
            self._policy = policy
            hooks = Hooks(*(hook and functools.partial(hook, self) for hook in self._hooks))
            loop_of(
                self.parts, self._saving, self._reporting, training, held_out, policy, hooks
            ).run()
            self._policy = None
        return self.state.history

    def evaluate(self, loader: Any) -> Metrics:
        """Return the mean metrics over the samples of all ranks, each counted once.

        Every rank calls it.
        """
        with randomness_kept():
            metrics = evaluate_model(self.parts, self._shared(loader, "loader"))
        assert metrics is not None
        return metrics

    def state_dict(self, *, model: str = "", ema: bool | None = None) -> dict[str, Any]:
        """Return the whole weights on the CPU of rank 0, {} on other ranks. Every rank calls it.

        `model` names one of several models. If the Trainer keeps an average of the weights, that is
        returned once there was a step; ema=False returns the weights themselves.
        """
        with self._shown(ema):
            return whole_weights.state_dict(self._named(model))

    def save(self, path: str | Path, *, model: str = "", ema: bool | None = None) -> None:
        """Write the whole weights, and nothing else, from rank 0. Every rank calls it.

        `path` is NAME.safetensors, NAME.pt, or a directory, which gets Hugging Face's layout.
        `model` and `ema` are those of state_dict().
        """
        with self._shown(ema):
            whole_weights.save(
                self._named(model), Path(path).expanduser().absolute(), self.state.step
            )

    def _named(self, model: str) -> nn.Module:
        if model and model not in self.models:
            known = ", ".join(filter(None, self.models))
            fix = (
                f"there are {known}" if known else "leave model= out: there is one, without a name"
            )
            raise UsageError(f"no model is called {model!r}", fix)
        return self.models[model] if model else self.bare

    def _shown(self, ema: bool | None) -> contextlib.AbstractContextManager[None]:
        """Put the requested weights into the model within a block: the average, or themselves."""
        if ema and all(stepper.average is None for stepper in self.parts.steppers):
            raise UsageError(
                "ema=True asks for an average of the weights, and this Trainer has none",
                "Trainer(..., ema=0.999) keeps one",
            )
        return self.parts.steppers.evaluating(average=ema is not False)

    def stop(self) -> None:
        """End the training on all ranks once min_period is over, like a hook that returns True.

        A call from `step` or a thread takes effect after this step, or after the next one if there
        are other ranks.
        """
        if self._policy is not None:
            self._policy.request_end()

    def close(self) -> None:
        """Close the trackers. The end of the program does that as well."""
        self._reporting.trackers.close()

    def _batches(
        self, asked: TrainingRequest, train_loader: Any, val_loader: Any
    ) -> tuple[Batches, Batches | None]:
        if train_loader is None and self._data[0] is None:
            raise UsageError("train() has no data", "give it a DataLoader: train(loader, epochs=1)")
        settings.refuse_spent(asked, train_loader, val_loader)
        training, held_out = self._data
        if train_loader is not None:
            training = self._shared(train_loader, "train_loader")
        if val_loader is not None:
            held_out = self._shared(val_loader, "val_loader")
        assert training is not None
        settings.refuse_unfit(asked, training, held_out, self._stream)
        return training, held_out

    def _shared(self, loader: Any, name: str) -> sharded_loader.Shard:
        seed = self.config.training.seed
        return sharded_loader.shared(loader, self.ranks, seed, self._stream, name)

    # -- checkpoints --------------------------------------------------------------------------

    def keep(self, name: str, holder: Any) -> None:
        """Save an object of your own in checkpoints and in states in memory.

        `holder` is a dict of tensors, numbers, texts and the like, or an object with state_dict()
        and load_state_dict(). It must be equal on all ranks, except for the shards of DTensors. It
        must have all of its tensors before train() or load_checkpoint(), which fill them in place.
        """
        self._saving.keep(name, holder)

    def save_checkpoint(self, directory: str | Path) -> Path:
        """Save into directory/step_NNNNNNNN; return that path when done. Every rank calls it."""
        return self._saving.save_to(as_path(directory))

    def load_checkpoint(self, directory: str | Path) -> Path:
        """Load one step, or the newest in a directory that verifies. Every rank calls it.

        Returns the directory of the step.
        """
        return self._saving.load(as_path(directory))
