"""Define orchestrator.Trainer, which trains a model on any number of ranks.

The same object runs in a notebook, in `python script.py`, under torchrun and under master_launch.
core/settings.py has its arguments, core/parts.py builds its parts from them, core/training.py holds
them together, core/loop.py trains, core/checkpointing.py saves, observe/reporter.py reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.engine.core import parts, settings
from orchestrator.engine.core.parts import as_path
from orchestrator.engine.core.settings import TrainerSettings
from orchestrator.engine.core.stopping import Metrics, TrainState
from orchestrator.engine.core.training import Training
from orchestrator.engine.ranks import spawn
from orchestrator.engine.saving import weights as whole_weights


@dataclass(eq=False, repr=False)
class Trainer(TrainerSettings):
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
    the training ended. The arguments are those of TrainerSettings; see docs/trainer.md.
    """

    def __post_init__(self) -> None:
        self.parts = made = parts.parts_of_trainer(self)
        self.ranks, self.model = made.ranks, made.model
        self.bare, self.models = made.bare, made.models
        self.optimizers = {stepper.name: stepper.optimizer for stepper in made.steppers}
        self.optimizer = made.steppers.first.optimizer
        self._training = Training(made, self)

    @property
    def state(self) -> TrainState:
        """The progress of the training."""
        return self._training.saving.state

    @staticmethod
    def launch(
        fn: Callable[..., Any], args: Sequence[Any] = (), nprocs: int | None = None
    ) -> list[Any]:
        """Run fn(rank, world_size, *args) in `nprocs` processes on this machine.

        Returns their results by rank. An exception of a rank is raised here.
        """
        return spawn.launch(fn, args, nprocs)

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
            train_loader: a DataLoader, or any iterable of batches.
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
        self._training.reporting.quiet = not verbose
        asked = settings.request_of(
            self.parts.config,
            self.config or {},
            epochs=epochs,
            min_period=min_period,
            max_period=max_period,
            save_every=save_every,
            best=best,
            patience=patience,
            save_to=save_to,
            keep=keep,
            resume=resume,
        )
        return self._training.train(asked, train_loader, val_loader)

    def evaluate(self, loader: Any) -> Metrics:
        """Return the mean metrics over the samples of all ranks, each counted once.

        Every rank calls it.
        """
        return self._training.evaluate(loader)

    def stop(self) -> None:
        """End the training on all ranks once min_period is over, like a hook that returns True.

        A call from `step` or a thread takes effect after this step, or after the next one if there
        are other ranks.
        """
        if self._training.policy is not None:
            self._training.policy.request_end()

    def close(self) -> None:
        """Close the trackers. The end of the program does that as well."""
        self._training.reporting.trackers.close()

    def state_dict(self, *, model: str = "", ema: bool | None = None) -> dict[str, Any]:
        """Return the whole weights on the CPU of rank 0, {} on other ranks. Every rank calls it.

        `model` names one of several models. If the Trainer keeps an average of the weights, that is
        returned once there was a step; ema=False returns the weights themselves.
        """
        with self.parts.shown(ema):
            return whole_weights.state_dict(self.parts.named(model))

    def save(self, path: str | Path, *, model: str = "", ema: bool | None = None) -> None:
        """Write the whole weights, and nothing else, from rank 0. Every rank calls it.

        `path` is NAME.safetensors, NAME.pt, or a directory, which gets Hugging Face's layout.
        `model` and `ema` are those of state_dict().
        """
        with self.parts.shown(ema):
            whole_weights.save_weights(self.parts.named(model), as_path(path), self.state.step)

    def keep(self, name: str, holder: Any) -> None:
        """Save an object of your own in checkpoints and in states in memory.

        `holder` is a dict of tensors, numbers, texts and the like, or an object with state_dict()
        and load_state_dict(). It must be equal on all ranks, except for the shards of DTensors. It
        must have all of its tensors before train() or load_checkpoint(), which fill them in place.
        """
        self.parts.auxiliary.add(name, holder)

    def save_checkpoint(self, directory: str | Path) -> Path:
        """Save into directory/step_NNNNNNNN; return that path when done. Every rank calls it."""
        return self._training.saving.save_to(as_path(directory))

    def load_checkpoint(self, directory: str | Path) -> Path:
        """Load one step, or the newest in a directory that verifies. Every rank calls it.

        Returns the directory of the step.
        """
        return self._training.saving.load(as_path(directory))
