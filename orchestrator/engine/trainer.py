"""orchestrator.Trainer: a model, an optimizer and data on any number of ranks.

The same object runs in a notebook, in `python script.py`, under torchrun and under master_launch.
It only brings the parts together, from a user's objects or from a config; the training itself is in
orchestrator.engine.core.loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.common.files import expanded
from orchestrator.config.arguments import checked
from orchestrator.config.schema import Config
from orchestrator.engine.core import average, evaluation, request, settings
from orchestrator.engine.core import loop as training_loop
from orchestrator.engine.core.kept import WHAT_IS_DRAWN, WHAT_TRAINS, ExtraState
from orchestrator.engine.core.loop import Loop
from orchestrator.engine.core.optimizer import (
    Factory,
    LrScheduler,
    Schedulers,
    configured,
    schedule,
)
from orchestrator.engine.core.optimizer_state import of_name
from orchestrator.engine.core.parts import (
    Parts,
    given,
    is_endless,
    not_taken,
    save_checkpoint,
    state_of,
)
from orchestrator.engine.core.request import Request
from orchestrator.engine.core.step import Steppers, names_of
from orchestrator.engine.core.stopping import Metrics, StopPolicy, TrainState
from orchestrator.engine.data import sharded_loader, sources
from orchestrator.engine.data.batch import Batches, DataPlace
from orchestrator.engine.data.dataset import HeldOutSamples, TrainingSamples
from orchestrator.engine.models import build
from orchestrator.engine.models.losses import Criterion, Loss, Losses, Step
from orchestrator.engine.observe.reporter import Measures, Reporter, say
from orchestrator.engine.observe.trackers import Trackers
from orchestrator.engine.ranks import agreement, collectives, ranks, spawn
from orchestrator.engine.ranks.randomness import randomness_kept
from orchestrator.engine.ranks.ranks import Ranks, device_name, gather, say_once
from orchestrator.engine.saving import loading, memory, ownership, pretrained, search
from orchestrator.engine.saving import weights as whole_weights
from orchestrator.engine.saving.checkpoint import Checkpoints
from orchestrator.engine.saving.in_memory import memory
from orchestrator.engine.saving.in_memory.memory import Memory
from orchestrator.engine.saving.in_memory.search import Found
from orchestrator.engine.sharding import corruption, mesh, refusals
from orchestrator.engine.sharding.blocks import described
from orchestrator.engine.sharding.several import Models
from orchestrator.records import checkpoint_manifest, checkpoint_store
from orchestrator.trackers.known import Tracker

KEEP_ALL = 1 << 30
NUMBERS = itertools.count(1)
Hook = Callable[["Trainer"], Any]


class Trainer:
    """Train a model on whatever this program runs on: one process, or many on many machines.

        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
        trainer = Trainer(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            loss=nn.CrossEntropyLoss(),
        )
        trainer.train(train_loader, val_loader, epochs=3, save_every="1 epoch", resume=True)
        print(trainer.state.val_metrics)

    The numbers are those of a plain loop on one process with a batch as large as that of all ranks
    together. `trainer.state` says where the training is: step, epoch, train_metrics, val_metrics,
    history, and why it ended. More is in docs/trainer.md.

    Arguments:
        model: the plain model; rank 0's weights count.
        optimizer: one of torch's over the model's parameters, a list of several that share the
            loss, such as [Muon(matrices), AdamW(others)], or a function of the parameters.
        models: instead of model, several by name; with optimizers, and schedulers, by name.
        optimizers: each takes the loss of its name that step(models, batch) returns.
        schedulers: by the names of optimizers.
        every: optimizers that step less often, by name: {"G": 5} in steps 5, 10, 15 ...
        loss: called with (outputs, targets) of a batch (inputs, targets); returns the mean over the
            samples, or (sum, count).
        step: instead of loss, called with (model, batch); returns the same, or (sum, count, {name:
            sum}) with further metrics.
        metrics: functions of (outputs, targets) by name, which follow the same rule as the loss.
        strategy: ddp, hybrid_shard, full_shard, shard_grad_op; for one process also dp, none. auto
            is ddp where the model fits, else hybrid_shard, and says which.
        accumulate: micro-batches per step.
        clip_grad_norm: the largest norm of the whole gradient; None leaves it as it is. Of several
            optimizers a dict by their names, or one number for each; ema likewise.
        ema: the decay of an exponential average of the weights, such as 0.999, which is evaluated
            and saved beside them.
        precision: fp32, bf16 or fp16, of the computation; weights stay as they are.
        warmup_steps: let the learning rates rise from zero over so many steps.
        scale_lr: multiply the learning rates by the number of ranks, at the start of the job.
        scheduler: one of torch's over the optimizer, or a function of the optimizer.
        scheduler_every: "step" or "epoch".
        find_unused_parameters: for a model that does not use all parameters in every step; ddp.
        elementwise: an optimizer of your own updates each element by itself, and so may have
            parameters in shards.
        stream: "dealt" if every rank's IterableDataset gives all samples, "own" if only its part.
        seed: of the order of the samples and of all randomness.
        device: of a single process; each of several has its own.
        backend: nccl, gloo or mpi; nccl where there are GPUs.
        trackers: "tensorboard", "wandb", "mlflow", "trackio", or objects with log(values, step) and
            close().
        on_train_begin: called with the Trainer before the first step.
        on_step_end: called with the Trainer after every step.
        on_epoch_end: called with the Trainer after every epoch. Each of these hooks ends the
            training there, on all ranks, if it returns True on any of them.
        log_every: steps between two lines of progress and of the metrics; 50.
        weights: a .safetensors file, or a directory with such files as Hugging Face has it. Each
            rank reads its part alone, so the model may be made on the meta device.
        config: further keys of docs/config.md, such as {"compile": {"enabled": True}}. A key that
            does not concern a Trainer is refused.
    """

    config: Config
    parts: Parts
    state: TrainState
    _keys: Mapping[str, Any] = {}  # of config=
    _training: Batches | None = None  # where a config names the data
    _held_out: Batches | None = None
    _stream = "dealt"
    _hooks = training_loop.Hooks()
    _trackers: Trackers | None = None
    _policy: StopPolicy | None = None  # while train() runs
    _run: ownership.Run
    _memory: Memory | None = None  # which outlives this process, if the launch may restart it
    _quiet = False
    _number = 0  # among those of this program that have trained, from 1 on

    @checked(optimizer=None)
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
        strategy: str = "auto",
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
        settings.check_arguments(strategy, scheduler_every, stream, warmup_steps, log_every)
        given = (model, optimizer, scheduler), (models, optimizers, schedulers)
        what = settings.trained(*given, strategy, config).seldom(every, elementwise)
        losses = Losses(loss, step, metrics or {}, [*what.optimizers], what.model)
        self._keys = settings.with_average(config or {}, ema)
        arguments = settings.arguments(precision, accumulate, clip_grad_norm, seed, log_every)
        everyone = self._join(arguments, strategy, find_unused_parameters, backend, device)
        strategy = self._chosen(what.model, arguments, strategy, find_unused_parameters, everyone)
        scale = ranks_of_batch(self.config, everyone, accumulate) if scale_lr else 1.0
        rates, own = (scale, warmup_steps), (clip_grad_norm, ema)
        self._assemble(self._spread(what, own, losses, everyone, strategy, weights, rates))
        self._stream, self._trackers = stream, Trackers(trackers, everyone, self._say)
        self._hooks = self._bound(on_train_begin, on_step_end, on_epoch_end)
        self._schedulers = scheduled(self.parts.steppers, what.schedulers, scheduler_every)
        self._say_rates(*rates)

    def _spread(
        self,
        trained: settings.Trained,
        own: tuple[settings.Each, settings.Each],  # clipping and average of each optimizer
        losses: Losses,
        everyone: Ranks,
        strategy: str,
        weights: str | Path | None,
        rates: tuple[float, int],  # the factor of learning rates, and the steps of their rise
    ) -> Parts:
        """Spread the model over the ranks, and bind the optimizers to what becomes of it."""
        losses.to(everyone.device)
        model, each = trained.model, trained.settings(self.config.training, *own)
        names, fill = names_of(model), self._filling(model, weights, everyone)
        shape, whole = mesh.distribute_local(model, strategy, everyone, self.config, fill)
        steppers = Steppers(
            trained.optimizers, names, model, shape, each, trained.every,
            lr_factor=functools.partial(warmed_up, *rates), elementwise=trained.elementwise,
        )  # fmt: skip
        return Parts(self.config, everyone, shape, whole, model, losses, steppers)

    def _bound(self, *hooks: Hook | None) -> training_loop.Hooks:
        return training_loop.Hooks(*(hook and functools.partial(hook, self) for hook in hooks))

    def _join(
        self,
        arguments: dict[str, Any],
        strategy: str,
        unused: bool,
        backend: str | None,
        device: str | int | torch.device | None,
    ) -> Ranks:
        self.config = settings.config_of(arguments, strategy, unused, self._keys)
        settings.make_deterministic(self.config)
        collectives.setup_distributed(backend, self.config.distributed.timeout)
        everyone = ranks.join(self.config)
        if device is None:
            say_unused_accelerator(everyone)
        return on_device(everyone, device)

    def _filling(
        self, model: nn.Module, weights: str | Path | None, everyone: Ranks
    ) -> Callable[[], None] | None:
        """Return what gives the sharded model its memory and its values, if a file has them."""
        if weights is None:
            return None
        path = as_path(weights)
        pretrained.refuse_unknown(model, path)
        return functools.partial(fill_model, model, path, self.config, everyone.device)

    def _chosen(
        self,
        model: nn.Module,
        arguments: dict[str, Any],
        strategy: str,
        unused: bool,
        everyone: Ranks,
    ) -> str:
        """Replace `auto` by a strategy, and say which; keep the batch that the job began with.

        The ddp of `auto` takes models that leave out parts of themselves: what nothing asked for
        has to work with any model. That costs ddp a look at the graph of each step.
        """
        if strategy == "auto" and everyone.world > 1:
            strategy, reason = settings.choose(model, everyone, self._keys)
            say(everyone, reason)
            static = self._keys.get("distributed", {}).get("static_graph")
            unused = unused or (strategy == "ddp" and not static)
            self.config = settings.config_of(arguments, strategy, unused, self._keys)
        self.config = kept_batch(self.config, everyone, loader=True)
        return strategy

    @classmethod
    def from_config(cls, config: Config, everyone: Ranks) -> Trainer:
        """Build the model, the optimizer and the data that a config names; then call train()."""
        trainer = cls.__new__(cls)
        say_unused_accelerator(everyone)
        config = kept_batch(config, everyone, loader=False)
        shape = mesh.make(config, everyone)
        model = build.build(config)
        path = as_path(config.model.weights) if config.model.weights is not None else None
        fill = functools.partial(fill_model, model, path, config, everyone.device)
        if not build.is_built_in(model):
            refusals.refuse_untrainable(model, everyone)
            refuse_unfit(model, config)
        optimizer = configured(config, model)
        whole = mesh.spread(model, shape, everyone, config, fill)
        steppers = Steppers(
            {"": optimizer}, {}, model, shape, {"": config.training},
            lr_factor=lambda step: schedule(config.scheduler, step, config.training.max_steps),
            nominal=build.nominal_count(config, everyone.world),
            keeps_settings=True,
        )  # fmt: skip
        losses = build.loss_of(config)
        trainer.config = config
        parts = Parts(config, everyone, shape, whole, model, losses, steppers)
        trainer._assemble(parts, built_in=True)
        train, held_out = sources.sources(config)
        trainer._training = TrainingSamples(train, config, everyone)
        if held_out is not None:
            trainer._held_out = HeldOutSamples(held_out, config, everyone)
        wanted = {
            name: config.logging.tracker_options.get(name) for name in config.logging.trackers
        }
        trainer._trackers = Trackers(wanted, everyone, trainer._say)
        return trainer

    def _assemble(self, parts: Parts, *, built_in: bool = False) -> None:
        self.parts, self.state = parts, TrainState()
        self.ranks, self.mesh = parts.ranks, parts.mesh
        self.bare, self.model = parts.bare, parts.model
        self.models = dict(self.bare) if isinstance(self.bare, Models) else {"": self.bare}
        self.optimizers = {s.name: s.optimizer for s in parts.steppers}
        self.optimizer = parts.steppers.first.optimizer
        self._schedulers = scheduled(parts.steppers, {}, "step")
        self._run = ownership.new_run(self.bare, built_in=built_in)
        self._introduce()
        self._keep_extra_state()

    def _keep_extra_state(self) -> None:
        extra = ExtraState(self.bare)
        if problem := extra.refused():
            self._say(
                "WARNING: checkpoints will not have what get_extra_state() gives, and a resume"
                f" begins without it: {problem}"
            )
        if extra:
            self.keep("extra state of modules", extra)
        self.keep(WHAT_TRAINS, self.parts.what_trains)
        for stepper in self.parts.steppers:
            if stepper.average is not None:
                self.keep(average.name_of(stepper.name), stepper.average)
        self._drawn = DataPlace()
        self.keep(WHAT_IS_DRAWN, self._drawn)
        losses = self.parts.losses
        if isinstance(losses, Losses) and (changing := losses.changing()) is not None:
            self.keep("the loss", changing)

    def _introduce(self) -> None:
        """Say who is there, and which ranks share what."""
        everyone, model = self.ranks, self.model
        if isinstance(model, nn.DataParallel):
            self._say(
                f"dp: one process splits every batch over {max(1, len(model.device_ids))} devices;"
                " ddp, with a process per device, is faster: Trainer.launch(function, nprocs=N) or"
                ' torchrun, and strategy="ddp"'
            )
        else:
            for line in mesh.picture(self.mesh, everyone):
                self._say(line)
        here = everyone.neighbours
        if everyone.world > 1 and everyone.rank == here[0]:
            host = f"{everyone.nodes[everyone.rank][1]}, {device_name(everyone.device)}"
            say_once(f"ranks {here[0]} to {here[-1]} of {everyone.world} are here: {host}")
        steppers = self.parts.steppers
        count = sum(parameter.numel() for parameter in steppers.parameters.values())
        self._say(f"{count:,} parameters")
        if self.mesh.mesh is not None:
            for line in described(model, sum(p.numel() for p in steppers.whole)):
                self._say(line)

    def _say_rates(self, lr_scale: float, warmup_steps: int) -> None:
        if lr_scale != 1:
            self._say(f"learning rates are multiplied by {lr_scale:g}, the number of ranks")
        if warmup_steps:
            self._say(f"learning rates rise from zero over the first {warmup_steps} steps")
        steppers = self.parts.steppers
        whole, trained = len(steppers.parameters), sum(len(s.named) for s in steppers)
        if trained < whole:
            self._say(f"{whole - trained} of {whole} parameters are not in the optimizer and stay"
                      " as they are")  # fmt: skip

    @staticmethod
    @checked()
    def launch(
        fn: Callable[..., Any], args: Sequence[Any] = (), nprocs: int | None = None
    ) -> list[Any]:
        """Run fn(rank, world_size, *args) in so many processes of this machine.

        Returns their results by rank; what a rank raises is raised here.
        """
        return spawn.launch(fn, args, nprocs)

    # -- training -----------------------------------------------------------------------------

    @checked(
        resume="resume=True with save_to=DIR goes on from the newest there; config={'checkpoint':"
        " {'resume': PATH}} begins with the one that it names"
    )
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

        Returns a line per epoch, as `state.history` has them. Epochs and steps count from the very
        beginning, also after a resume; seconds from this call.

        Arguments:
            train_loader: a DataLoader, or any iterable of batches. A Trainer that was made from a
                config has its own.
            val_loader: evaluated after every epoch.
            epochs: end after so many.
            min_period: do not end before, such as "30s", "2m", "3 epochs", "1000 steps".
            max_period: end then, whatever else was said.
            save_every: save so often, and at the end.
            best: also save, and keep, the best by a metric: "min val_loss", "max val_accuracy".
            patience: end when so many epochs have brought nothing better.
            save_to: the directory; else the experiment's outputs/checkpoints, or ./checkpoints.
                Without save_every it is saved at the end, and when it is stopped.
            keep: how many checkpoints stay there; 3.
            resume: go on from the newest checkpoint that verifies, if there is one.
            verbose: False says nothing.
        """
        self._quiet = not verbose
        asked = request.of(
            self.config, self._keys, self._training is not None, epochs=epochs,
            min_period=min_period, max_period=max_period, save_every=save_every, best=best,
            patience=patience, save_to=save_to, keep=keep, resume=resume,
        )  # fmt: skip
        self._train(asked, *self._data(asked, train_loader, val_loader))
        return self.state.history

    def _train(self, asked: Request, training: Batches, held_out: Batches | None) -> None:
        checkpoints = self._resumed(asked, self._kept())
        policy = asked.policy(self.state)
        self._begin_to_draw(training)
        self._say(f"training on {training.description}")
        self._say_where(checkpoints)
        if policy.nothing_to_do():
            self._say_nothing_to_do(checkpoints)
            return
        self._loop(training, held_out, policy, checkpoints, at_end=asked.at_end).run()
        self._policy = None

    def _say_where(self, checkpoints: Checkpoints | None) -> None:
        """Say where it saves, or that it does not; of a launched job the head says where all is."""
        if checkpoints is not None:
            if training_loop.outputs_directory() is None:
                self._say(f"checkpoints go to {checkpoints.directory}")
        elif self._training is None:
            self._say("nothing of it is saved: train(..., save_to=DIR) saves at the end and when it"
                      " is stopped")  # fmt: skip

    def _say_nothing_to_do(self, checkpoints: Checkpoints | None) -> None:
        self._say(f"nothing to do: {self.state.epoch} epochs and {self.state.step} steps are"
                  " done, and both count from the very beginning")  # fmt: skip
        if checkpoints is not None:
            checkpoints.close()

    def _loop(
        self,
        training: Batches,
        held_out: Batches | None,
        policy: StopPolicy,
        checkpoints: Checkpoints | None,
        *,
        at_end: bool,
    ) -> Loop:
        config, state = self.config, self.state
        state.ended = ""
        self._policy = policy
        if self._trackers is not None:
            self._trackers.begin(self._run.id, state.step)
        built_in = self._training is not None
        flops = (build.flops_per_sample(config, self.bare) if built_in
                 else build.stated_flops(self.bare))  # fmt: skip
        size = training.batch_size
        at_once = training.round_size * config.training.gradient_accumulation
        measures = Measures(
            policy.max_steps,
            counted(config, self.parts.losses),
            size and size * config.training.gradient_accumulation,
            flops,
            lambda: (policy.steps_left(training.samples, at_once), policy.seconds_left),
        )
        reporter = Reporter(
            config, self.ranks, self.model, measures, step=state.step, tokens=state.tokens,
            trackers=self._trackers, say=self._say, trainer=self._number,
        )  # fmt: skip
        reporter.epoch_sums = state.epoch_sums
        comparison = corruption.start(
            config, self.ranks, self.mesh, state.step,
            functools.partial(self._distrust, checkpoints), self._say,
        )  # fmt: skip
        return Loop(
            self.parts, state, training, held_out, policy, reporter, checkpoints, at_end,
            self._schedulers, self._hooks, comparison, run_id=self._run, memory=self._memory,
        )  # fmt: skip

    def _distrust(self, checkpoints: Checkpoints | None, after: int) -> None:
        """Let nobody go on from what was kept after a step."""
        if self._memory is not None:
            self._memory.distrust(after)
        if checkpoints is not None:
            checkpoints.distrust(after)

    def evaluate(self, loader: Any) -> Metrics:
        """Give the means over all samples of all ranks, each counted once. Every rank calls it."""
        with randomness_kept():
            metrics = evaluation.evaluate(self.parts, self._shared(loader, "loader"))
        assert metrics is not None
        return metrics

    @checked()
    def predict(self, loader: Any, output: evaluation.Forward = evaluation.forward) -> Any:
        """Give the outputs for all samples, in the loader's order, on the CPU of every rank.

        Every rank calls it. `output` is called with (model, batch); without it the model is called
        with the inputs of each batch. What it returns may hold several tensors, in lists or dicts.
        """
        if output is evaluation.forward and isinstance(self.bare, Models):
            raise UsageError(
                f"predict() does not know which of the models to call: {', '.join(self.models)}",
                "say it: trainer.predict(loader, lambda models, batch: models[NAME](batch))",
            )
        with randomness_kept():
            return evaluation.predict(self.parts, self._shared(loader, "loader"), output)

    @checked()
    def state_dict(self, *, model: str = "", ema: bool | None = None) -> dict[str, Any]:
        """Give the whole weights, on the CPU of rank 0; {} on the others. Every rank calls it.

        Of one of several models, if it is named. With ema= they are the average, if there has been
        a step; ema=False gives the weights themselves.
        """
        with self._shown(ema):
            return whole_weights.state_dict(self._named(model))

    @checked()
    def save(self, path: str | Path, *, model: str = "", ema: bool | None = None) -> None:
        """Write the whole weights, and nothing else, from rank 0. Every rank calls it.

        NAME.safetensors, NAME.pt, or a directory, which gets the layout of Hugging Face. `model`
        and `ema` as in state_dict().
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
        """Have the model hold the weights that are asked for."""
        if ema and all(stepper.average is None for stepper in self.parts.steppers):
            raise UsageError(
                "ema=True asks for an average of the weights, and this Trainer has none",
                "Trainer(..., ema=0.999) keeps one",
            )
        return self.parts.steppers.evaluating(average=ema is not False)

    def stop(self) -> None:
        """End on all ranks, once min_period is over: as a hook that returns True.

        From elsewhere (`step`, a thread) it is this step, or the next one if there are other ranks.
        """
        if self._policy is not None:
            self._policy.request_end()

    def close(self) -> None:
        """Close the trackers; a program that ends does so, too."""
        if self._trackers is not None:
            self._trackers.close()

    # -- what train() was asked for -----------------------------------------------------------

    def _data(
        self, asked: Request, train_loader: Any, val_loader: Any
    ) -> tuple[Batches, Batches | None]:
        if train_loader is None and self._training is None:
            raise UsageError("train() has no data", "give it a DataLoader: train(loader, epochs=1)")
        request.refuse_spent(asked, train_loader, val_loader)
        training, held_out = self._training, self._held_out
        if train_loader is not None:
            training = self._shared(train_loader, "train_loader")
        if val_loader is not None:
            held_out = self._shared(val_loader, "val_loader")
        assert training is not None
        request.refuse_unfit(asked, training, held_out, self._stream)
        return training, held_out

    def _begin_to_draw(self, training: Batches) -> None:
        """Have the samples go on where they were, here or as they were saved."""
        if self.state.position < 0:  # an earlier version counted batches
            self.state.position = self.state.batch * training.round_size
        self._drawn.begin(training, self.state, self._say)

    def _shared(self, loader: Any, name: str) -> sharded_loader.Shard:
        seed, first = self.config.training.seed, settings.first_world(self.ranks.world)
        return sharded_loader.shared(loader, self.ranks, seed, self._stream, name, first)

    def _say(self, text: str) -> None:
        if not self._quiet:
            say(self.ranks, text)

    # -- checkpoints --------------------------------------------------------------------------

    @checked()
    def keep(self, name: str, holder: Any) -> None:
        """Have checkpoints, and states in memory, hold something of yours.

        A dict of tensors, numbers, texts and the like, or an object with state_dict() and
        load_state_dict(). It is alike on all ranks, except for shards of tensors (DTensors), and
        has all of its tensors before train() or load_checkpoint(), which fill them in place.
        """
        self.parts.auxiliary.add(name, holder)

    @checked()
    def save_checkpoint(self, directory: str | Path) -> Path:
        """Save into directory/step_NNNNNNNN and wait for it. Every rank calls it."""
        endless = self._training is not None
        store = self._store(as_path(directory), KEEP_ALL, background=False)
        with contextlib.closing(store) as checkpoints:
            save_checkpoint(checkpoints, self.parts, self.state, self._schedulers, endless)
            checkpoints.finish()
            checkpoints.leave()
        return checkpoint_store.final(checkpoints.directory, self.state.step)

    @checked()
    def load_checkpoint(self, directory: str | Path) -> Path:
        """Load what was saved last into a directory and verifies, or one step. Every rank calls it.

        Returns the directory of the step.
        """
        path = as_path(directory)
        search.refuse_unreadable(path)
        room = path.parent if checkpoint_store.STEP.fullmatch(path.name) else path
        return self._load_named(str(path), room).path

    def _load_named(self, path: str, room: Path) -> checkpoint_store.Checkpoint:
        loaded = self._load(search.named(path, room), room)
        if loaded is None:
            raise CheckFailed(
                f"{path}: none of its checkpoints verifies",
                "look at them with: orchestrator checkpoint verify",
            )
        return loaded

    def _load(
        self,
        find: search.Find | None,
        room: Path,
        *,
        in_memory: Path | None = None,
        disk_alone: bool = True,
    ) -> checkpoint_store.Checkpoint | None:
        target = loading.Target(
            *(self.ranks, self._run, self.bare, self.parts.auxiliary, self._accept, self._say)
        )
        loaded = loading.resume(find, target, room, memory=in_memory, disk_alone=disk_alone)
        return self._go_on_from(loaded)

    def _go_on_from(
        self, loaded: checkpoint_store.Checkpoint | None
    ) -> checkpoint_store.Checkpoint | None:
        if loaded is not None:
            self._say_not_taken(loaded.progress)
            for name in self.parts.auxiliary.lacking(loaded.progress):
                self._say(f"WARNING: nothing of {name!r} was saved there: it stays as it is")
            for name in self.parts.auxiliary.unread(loaded.progress):
                self._say(f"WARNING: {name!r} was kept there, and this program keeps none: it is"
                          " not read")  # fmt: skip
            self.state = state_of(loaded.progress)
            self._schedulers.restore(loaded.progress.get("scheduler"))
            if before := ownership.run_of(loaded.progress):
                generation = checkpoint_manifest.generation(loaded.progress)
                self._run = dataclasses.replace(self._run, id=before.id, generation=generation)
        return loaded

    def _say_not_taken(self, progress: Mapping[str, Any]) -> None:
        """Say what the program has changed of its optimizer, and a resume does not take."""
        steppers, saved = self.parts.steppers, progress.get("given")
        for name, now in given(steppers, self._schedulers).items():
            other = not_taken(of_name(saved, name), now)
            if other and not steppers.by_name[name].state.keeps_settings:
                whose = f"trainer.optimizers[{name!r}]" if name else "trainer.optimizer"
                self._say(f"as saved: {other}; on_train_begin= may change {whose}")

    def _place_in_memory(self) -> Path | None:
        """Return where states outlive the ranks, for the first training of this Trainer.

        Only there an earlier attempt may have left a state: later on this Trainer itself has the
        newest.
        """
        if self._number:
            return None
        self._number = next(NUMBERS)
        every = self.config.checkpoint.memory_every
        return memory.place(f"trainer{self._number}", every, self._say)

    def _open_memory(self, place: Path | None) -> None:
        """Keep states in memory from now on, with the number of this start of the training."""
        if place is None:
            return
        self._memory = Memory(
            place, self.ranks, self._run, self._say,
            node_holds_all=holds_all(self.mesh, self.ranks),
            every=self.config.checkpoint.memory_every,
        )  # fmt: skip
        if not self._memory.off:
            self._memory.keep_only(self.state.step)

    def _accept(self, progress: Any) -> None:
        built_in = self._training is not None
        if is_endless(progress) != built_in:
            kinds = "a Trainer", "the built-in engine"
            raise CheckFailed(
                f"the checkpoint is one of {kinds[not built_in]}, not of {kinds[built_in]}",
                "its weights alone: orchestrator checkpoint export",
            )

    def _accept_user_progress(self, progress: Any) -> None:
        """Refuse what another script saved, or the same with another model: nobody has named it."""
        self._accept(progress)
        other = ownership.run_of(progress)
        if other is None or (other.program, other.model) == (self._run.program, self._run.model):
            return
        what = f"saved by {other}, this is {self._run.program}"
        if other.program == self._run.program:
            what = f"{other} saved them with another model"
        raise CheckFailed(what)

    def _resumed(self, asked: Request) -> Checkpoints | None:
        """Resume, if asked or restarted; make the stores that a training saves into, if it does."""
        place = self._place_in_memory()
        checkpoints = self._resumed_from(asked, place)
        self._open_memory(place)
        if checkpoints is not None and self._memory is not None and not self._memory.off:
            checkpoints.run = self._memory.run  # states on disk and in memory are counted together
            self._run = self._memory.run
        return checkpoints

    def _resumed_from(self, asked: Request, place: Path | None) -> Checkpoints | None:
        outputs, built_in = training_loop.outputs_directory(), self._training is not None
        default = outputs / "checkpoints" if outputs else None if built_in else Path("checkpoints")
        if asked.directory is None and default is None:
            self._without_directory(asked, place)
            return None
        directory = as_path(asked.directory or default or "")
        loaded = self._begun(asked, place, directory)
        if not asked.saves:
            return None
        # Where nodes share no disk, one that had nothing of it was given its part for the moment.
        here = loaded is not None and all(gather(loaded.path.parent == directory))
        if asked.asks_to_save and not here:
            search.refuse_later(directory, self.state.step)
        in_background = self.config.checkpoint.asynchronous
        checkpoints = self._store(directory, asked.keep, background=in_background)
        if loaded is not None and here:
            checkpoints.last_saved = loaded.step
        checkpoints.known_whole = self.state.step
        return checkpoints

    def _begun(
        self, asked: Request, place: Path | None, directory: Path
    ) -> checkpoint_store.Checkpoint | None:
        """Load what it is to go on from, if there is something."""
        searches = asked.directory is None and asked.resume == "auto"
        find = search.newest(
            directory, searches=searches, accept=self._accept_user_progress, say=self._say
        )
        loaded = None
        again = asked.resume == "auto" or ownership.attempt() > 1
        if again or place is not None:
            # What an earlier attempt saved is this run's own.
            loaded = self._load(find, directory, in_memory=place, disk_alone=again)
            if loaded is None and asked.resume == "auto":
                self._say(f"nothing to resume from in {directory}: starting from the beginning")
        if loaded is None and asked.resume not in ("auto", "never"):
            loaded = self._load_named(asked.resume, directory)
        return loaded

    def _without_directory(self, asked: Request, place: Path | None) -> None:
        """Say that the engine, started by hand, has no directory of its own to save into."""
        loaded = self._load(None, Path.cwd(), in_memory=place) if place is not None else None
        if not asked.saves and asked.resume == "never":
            return
        fix = "set checkpoint.directory"
        if asked.asks_to_save:
            raise CheckFailed(
                "checkpoint.steps, seconds or best is set, but this run has no experiment to save"
                " into",
                fix,
            )
        if asked.resume not in ("never", "auto") and loaded is None:
            self._load_named(asked.resume, Path.cwd())
        self._say(f"this run has no experiment, so nothing of it is saved: {fix}")

    def _store(self, directory: Path, keep: int, *, background: bool) -> Checkpoints:
        """Open a store; unless in the background, it copies no state: the caller waits."""
        wanted = dataclasses.replace(self.config.checkpoint, keep=keep, asynchronous=background)
        store = Checkpoints(
            wanted, directory, self.ranks, self._run, self._say,
            node_holds_all=holds_all(self.mesh, self.ranks),
        )  # fmt: skip
        self._run = store.run
        return store


def warmed_up(lr_scale: float, warmup_steps: int, step: int) -> float:
    return lr_scale * min(1.0, step / max(1, warmup_steps))


def scheduled(steppers: Steppers, schedulers: Mapping[str, Any], every: str) -> Schedulers:
    if every != "step" and all(scheduler is None for scheduler in schedulers.values()):
        raise UsageError(
            f"scheduler_every={every!r} says when a scheduler steps, but there is none",
            "say scheduler=, or leave scheduler_every= out",
        )
    return Schedulers(
        {
            stepper.name: LrScheduler(schedulers.get(stepper.name), stepper.optimizer, every)
            for stepper in steppers
        }
    )


def counted(config: Config, losses: Loss) -> str:
    """Name what the loss is the mean of."""
    if isinstance(losses, Losses):  # the program's own
        return "targets" if losses.counts or losses.step else "samples"
    text = config.dataset.kind in ("library", "tokens", "synthetic")
    if config.model.kind == "decoder" or (config.model.kind == "target" and text):
        return "tokens"
    return "samples"


def kept_batch(config: Config, everyone: Ranks, *, loader: bool) -> Config:
    """Keep the batch that this job began with, on whatever ranks it is now."""
    say_it = functools.partial(say, everyone)
    return settings.keep_batch(config, everyone.world, say_it, loader=loader)


def ranks_of_batch(config: Config, everyone: Ranks, accumulate: int) -> float:
    """Return how many ranks with `accumulate` micro-batches each have this batch."""
    return everyone.world * config.training.gradient_accumulation / accumulate


def as_path(directory: str | Path) -> Path:
    return Path(expanded(directory)).absolute()


def refuse_unfit(model: nn.Module, config: Config) -> None:
    """Refuse a user's model that differs between ranks, or has no values and no file of them."""
    if not mesh.is_empty(model):
        agreement.refuse_differences(model)
        return
    if config.model.weights is None:
        raise UsageError(
            f"model.target ({config.model.target}) made its model on the meta device",
            "name a file with its weights: model.weights",
        )
    pretrained.refuse_unknown(model, as_path(config.model.weights))
    agreement.refuse_other_shapes(agreement.tensors(model))


def fill_model(
    model: nn.Module, weights: Path | None, config: Config, device: torch.device
) -> None:
    """Give a model its first values, once it is sharded: from its seed, or a file."""
    target = torch.device("cpu") if config.fsdp.cpu_offload else device
    if build.is_built_in(model):
        build.initialise(model, config.training.seed, target)
    elif mesh.is_empty(model):
        mesh.give_memory(model, target)
    if weights is not None:
        pretrained.load(model, weights)


def say_unused_accelerator(everyone: Ranks) -> None:
    if kind := ranks.unused_accelerator(everyone.device):
        say(
            everyone,
            f"WARNING: the training runs on the CPU: this machine has an accelerator ({kind}), but"
            " only GPUs of CUDA or ROCm are used",
        )


def on_device(everyone: Ranks, device: str | int | torch.device | None) -> Ranks:
    if device is None:
        return everyone
    if everyone.world > 1:
        raise UsageError("device= is for one process; each of several has its own", "leave it out")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"device={str(device)!r} cannot be used: {reason}", "leave it out"
        ) from None
    return dataclasses.replace(everyone, device=chosen)
