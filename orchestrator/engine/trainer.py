"""orchestrator.Trainer: a user's own model, optimizer and DataLoader on any number of ranks.

The same object runs in a notebook, in `python script.py`, under torchrun and under master_launch.
It stands on the engine's mesh, checkpoints and agreement; what is its own is that everything comes
from the user as a plain loop would have it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.config.parse import at_least
from orchestrator.engine.core import duration, outset, stop_vote
from orchestrator.engine.core.bound import Bound, Factory, names_of
from orchestrator.engine.core.stopping import Limits, Metrics, Run, TrainState
from orchestrator.engine.data import sharded_loader
from orchestrator.engine.models.losses import Criterion, Losses, Step
from orchestrator.engine.observe.reporter import say
from orchestrator.engine.observe.trackers import Tracker, Trackers
from orchestrator.engine.ranks import collectives, mesh, ranks, spawn
from orchestrator.engine.saving.checkpoint import Checkpoints
from orchestrator.engine.train import seed_all, to_device
from orchestrator.errors import CheckFailed, JobFailed, UsageError
from orchestrator.records import checkpoint_store

NONE_FOR_EVER = 1 << 30


class Trainer:
    """See docs/trainer.md. Every argument after `loss` goes by its name."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Factory,
        loss: Criterion | None = None,
        *,
        step: Step | None = None,
        metrics: Mapping[str, Criterion] | None = None,
        strategy: str = "hybrid_shard",
        accumulate: int = 1,
        clip_grad_norm: float | None = None,
        precision: str = "fp32",
        warmup_steps: int = 0,
        scale_lr: bool = False,
        scheduler: Any = None,
        scheduler_every: str = "step",
        find_unused_parameters: bool = False,
        stream: str = "dealt",
        seed: int = 0,
        device: str | torch.device | None = None,
        backend: str | None = None,
        trackers: Sequence[str | Tracker] | Mapping[str, Any] = (),
        on_epoch_end: Callable[[Trainer], Any] | None = None,
        log_every: int = 50,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        outset.check(strategy, scheduler_every, stream, warmup_steps, log_every)
        self.losses = Losses(loss, step, metrics or {})
        own = outset.training(precision, accumulate, clip_grad_norm, seed)
        self.config = outset.config(own, strategy, find_unused_parameters, config or {})
        collectives.setup_distributed(backend, self.config.distributed.timeout)
        self.ranks = outset.placed(ranks.join(self.config), device)
        self.stream, self.log_every, self.on_epoch_end = stream, log_every, on_epoch_end
        self.warmup, self.lr_scale = warmup_steps, float(self.ranks.world) if scale_lr else 1.0

        names = names_of(model)
        self.bare = model
        self.mesh, self.model = outset.spread(
            model, strategy, self.ranks, self.config, find_unused_parameters
        )
        self.bound = Bound(optimizer, names, model, precision)
        self.scheduler = outset.scheduler(scheduler, self.bound.optimizer)
        self.scheduler_every = scheduler_every
        self._begin()
        self.trackers = Trackers(trackers, self.ranks, self._say)

    def _begin(self) -> None:
        self.state = TrainState()
        self._directories: dict[tuple[str, str], Checkpoints] = {}
        self._sums: dict[str, Tensor] = {}  # of the step, on this rank: (sum, count) per name
        self._epoch_sums: dict[str, list[float]] = {}  # of the epoch, on all ranks
        self._asked: stop_vote.Agreement | None = None
        self._bad = 0  # steps in a row
        self._quiet = False
        for line in outset.words(self.model, self.mesh, self.ranks, self.lr_scale, self.warmup):
            self._say(line)
        whole, trained = len(self.bound.now), len(self.bound.named)
        if trained < whole:
            self._say(f"{whole - trained} of {whole} parameters are not in the optimizer and stay"
                      " as they are")  # fmt: skip

    @staticmethod
    def launch(
        fn: Callable[..., Any], args: Sequence[Any] = (), nprocs: int | None = None
    ) -> list[Any]:
        """Run fn(rank, world_size, *args) in so many processes of this machine; their results."""
        return spawn.launch(fn, args, nprocs)

    # -- training -----------------------------------------------------------------------------

    def train(
        self,
        train_loader: Any,
        val_loader: Any = None,
        epochs: int | None = None,
        *,
        min_period: str | None = None,
        max_period: str | None = None,
        save_every: str | None = None,
        save_to: str | Path | None = None,
        keep: int = 3,
        resume: bool = False,
        verbose: bool = True,
    ) -> list[Metrics]:
        """Until `epochs` are done, but at least min_period and at most max_period."""
        if epochs is None and max_period is None:
            raise UsageError(
                "train() has no end",
                'say epochs=, or max_period= such as "2m", "3 epochs" or "1000 steps"',
            )
        at_least("epochs", epochs, 1)
        at_least("keep", keep, 1)
        saving = duration.parse("save_every", save_every)
        place = Path(save_to or outset.own_directory())
        self._quiet = not verbose
        if resume:
            self._resume(place)
        if saving:
            outset.refuse_later(place.absolute(), self.state.step)
        limits = Limits(
            epochs,
            duration.parse("min_period", min_period),
            duration.parse("max_period", max_period),
            time.monotonic(),
        )  # fmt: skip
        training = self._dealt(train_loader, "train_loader")
        held_out = None if val_loader is None else self._dealt(val_loader, "val_loader")
        self._say(f"training on {training.words}")
        if self._done(limits):
            self._say(f"nothing to do: {self.state.epoch} epochs and {self.state.step} steps are"
                      " done, and epochs= counts from the very beginning")  # fmt: skip
            return self.state.history
        with self._listening() as asked:
            run = Run(self, asked, limits, saving, place, keep)
            while not self.state.ended:
                self._epoch(training, held_out, run)
            run.end()
        self._say(f"{self.state.ended} after step {self.state.step}")
        return self.state.history

    def _epoch(
        self, training: sharded_loader.Deal, held_out: sharded_loader.Deal | None, run: Run
    ) -> None:
        """One epoch, or what is left of it; `ended` is set where it is the last."""
        state, every = self.state, self.config.training.gradient_accumulation
        self.model.train()
        for micro in training.epoch(state.epoch, state.batch):
            last = micro.last or (state.batch + 1) % every == 0
            if last:
                run.asked.send()  # who wants to stop: told while the step computes
            self._micro(micro, last)
            state.batch += 1
            if last:
                self._step(run)
                if micro.last:
                    break
                run.after_step()
                if state.ended:
                    self._close_epoch(held_out, run, whole=False)
                    return
        state.epoch, state.batch = state.epoch + 1, 0
        self._close_epoch(held_out, run, whole=True)
        run.after_epoch()

    def _micro(self, micro: sharded_loader.Micro, last: bool) -> None:
        config, state = self.config, self.state
        batch = to_device(micro.data, self.ranks.device)
        seed_all(config.training.seed, state.step + 1, state.batch, self.ranks.rank)
        with mesh.backward(self.model, self.mesh, config, last=last):
            with mesh.computing(self.mesh, self.ranks, config):
                found = self.losses(self.model, batch)
            undo = self.mesh.copies if self.mesh.strategy == "ddp" else 1  # ddp averages over ranks
            loss = found["loss"][0] * (self.bound.scale * undo * micro.real)
            loss.backward()  # type: ignore[no-untyped-call]
        outset.add(self._sums, found, micro.real)

    def _step(self, run: Run) -> None:
        """Over all ranks: gradients, losses, how much was counted. One message, one step."""
        names = list(self._sums)
        if self.state.step == 0:
            outset.same_names(names)
        told = torch.cat([self.bound.squares().view(1), *self._sums.values()])
        if self.ranks.world > 1:
            dist.all_reduce(told)
        squares, *pairs = told.tolist()
        sums = dict(zip(names, zip(pairs[::2], pairs[1::2], strict=True), strict=True))
        self._sums = {}
        self.state.step += 1
        loss, count = sums["loss"]
        divide = self.bound.scale * count
        norm = math.sqrt(squares / self.mesh.copies) / divide if divide else math.nan
        most = self.config.training.grad_clip_norm
        clip = min(1.0, most / (norm + 1e-6)) if most else 1.0
        lr = self.lr_scale * min(1.0, self.state.step / max(1, self.warmup))
        if math.isfinite(norm) and math.isfinite(loss):
            self.bound.step(clip / divide, lr=lr)
            self._bad = 0
            outset.add_floats(self._epoch_sums, sums)
        elif count:
            self._skip()
        else:
            self._say(f"step {self.state.step} is skipped: none of its targets counts")
        self.bound.forget()
        self._show(run, sums, norm, lr)
        if self.scheduler is not None and self.scheduler_every == "step":
            self.scheduler.step()

    def _skip(self) -> None:
        curable = self.bound.skip()
        why = "fp16 overflowed, the loss's scale is halved" if curable else (
            "NaN or inf in the loss or the gradients")  # fmt: skip
        self._say(f"step {self.state.step} is skipped on all ranks: {why}")
        self._bad = 0 if curable else self._bad + 1
        if self._bad >= self.config.training.max_bad_steps:
            raise JobFailed(
                f"{self._bad} steps in a row had NaN or inf, the last was step {self.state.step}",
                "look at the data, or try a smaller learning rate, or a warmup",
            )

    def _show(self, run: Run, sums: Mapping[str, Any], norm: float, lr: float) -> None:
        if self.state.step % self.log_every:
            return
        base = self.bound.optimizer.param_groups[0]["lr"]
        means = {name: total / count for name, (total, count) in sums.items() if count}
        shown = {**means, "lr": float(base) * lr, "grad_norm": norm}
        run.file.write({"step": self.state.step, **shown})
        self.trackers.log(shown, self.state.step)
        self._say(outset.line(f"step {self.state.step}", shown))

    def _close_epoch(self, held_out: sharded_loader.Deal | None, run: Run, *, whole: bool) -> None:
        state = self.state
        state.train_metrics = {n: total / count for n, (total, count) in self._epoch_sums.items()}
        if whole:
            self._epoch_sums = {}
        if held_out is not None:
            state.val_metrics = self._evaluation(held_out, run)
        found = {f"train_{name}": value for name, value in state.train_metrics.items()}
        found |= {f"val_{name}": value for name, value in state.val_metrics.items()}
        state.history.append({"epoch": state.epoch, "step": state.step, **found})
        run.file.write({"step": state.step, "epoch": state.epoch, **found})
        self.trackers.log({**found, "epoch": state.epoch}, state.step)
        self._say(outset.line(f"epoch {state.epoch}{'' if whole else ' and a part'}", found))
        if whole and self.scheduler is not None and self.scheduler_every == "epoch":
            outset.step_epoch(self.scheduler, state.val_metrics or state.train_metrics)
        if self.on_epoch_end is not None and self.on_epoch_end(self):
            self.stop()

    def evaluate(self, loader: Any) -> Metrics:
        """Means over all samples of all ranks, each counted once."""
        return self._evaluation(self._dealt(loader, "loader"), None)

    def _evaluation(self, held_out: sharded_loader.Deal, run: Run | None) -> Metrics:
        sums: dict[str, Tensor] = {}
        self.model.eval()
        with torch.no_grad(), contextlib.ExitStack() as after:
            after.callback(self.model.train)
            after.callback(mesh.shards_again, self.model)
            for micro in held_out.epoch(0):
                if run is not None:
                    run.goes_on()
                batch = to_device(micro.data, self.ranks.device)
                with mesh.computing(self.mesh, self.ranks, self.config):
                    outset.add(sums, self.losses(self.model, batch), micro.real)
        told = torch.cat(list(sums.values()))
        if self.ranks.world > 1:
            dist.all_reduce(told)
        pairs = zip(sums, told[::2].tolist(), told[1::2].tolist(), strict=True)
        return {name: total / count if count else math.nan for name, total, count in pairs}

    def stop(self) -> None:
        """From on_epoch_end or anywhere: end after this step or epoch, once min_period is over."""
        if self._asked is not None:
            self._asked.ask(stop_vote.ENOUGH)

    def close(self) -> None:
        """Of the trackers, which a program that ends closes too."""
        self.trackers.close()

    def _dealt(self, loader: Any, name: str) -> sharded_loader.Deal:
        return sharded_loader.dealt(
            loader, self.ranks, self.config.training.seed, self.stream, name
        )

    def _done(self, limits: Limits) -> bool:
        """At the end of an epoch; rank 0's clock decides."""
        enough = limits.epochs is not None and self.state.epoch >= limits.epochs
        done = (enough and limits.may_end(self.state)) or limits.has_to_end(self.state)
        return ranks.gather(done)[0]

    @contextlib.contextmanager
    def _listening(self) -> Iterator[stop_vote.Agreement]:
        """SIGTERM and Ctrl-C end the training on all ranks after the same step."""
        asked = self._asked = stop_vote.Agreement()
        self.state.ended = ""
        numbers = (signal.SIGTERM, signal.SIGINT)
        main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in numbers if main}

        def once(number: int, frame: FrameType | None) -> None:
            asked.ask(stop_vote.STOP)
            if asked.alone:  # a second one ends it at once
                signal.signal(number, before[signal.Signals(number)])

        for number in before:
            signal.signal(number, once)
        try:
            yield asked
        finally:
            self._asked = None
            for number, handler in before.items():
                signal.signal(number, handler)

    def _say(self, text: str) -> None:
        if not self._quiet:
            say(self.ranks, text)

    # -- checkpoints --------------------------------------------------------------------------

    def save_checkpoint(self, directory: str | Path) -> Path:
        """Every rank calls it. Where it lies: directory/step_NNNNNNNN; none is taken away."""
        place = self._saving(Path(directory), NONE_FOR_EVER)
        self._save(place)
        assert place.thread is not None
        place.thread.join()
        problem = place.problem
        place.wait()
        if problem:
            raise JobFailed(problem)
        return checkpoint_store.final(place.directory, self.state.step)

    def load_checkpoint(self, directory: str | Path) -> Path:
        """What was saved last into a directory and verifies, or one step; every rank calls it."""
        path = Path(directory).absolute()
        steps = outset.saved_steps(path)
        parent = path.parent if checkpoint_store.STEP.fullmatch(path.name) else path
        for step in steps:
            found = checkpoint_store.final(parent, step)
            try:
                place = self._saving(parent, NONE_FOR_EVER, str(found))
                progress = place.resume(self.bare, self.bound)
                break
            except CheckFailed as error:
                if step == steps[-1]:
                    raise
                self._say(f"WARNING: {error.what}; trying the one before it")
        self._epoch_sums = {name: list(pair) for name, pair in progress["epoch_sums"].items()}
        self.state = TrainState(**progress["state"])
        if self.scheduler is not None and progress["scheduler"] is not None:
            self.scheduler.load_state_dict(progress["scheduler"])
        return found

    def _saving(self, directory: Path, keep: int, resume: str = "never") -> Checkpoints:
        key = (f"{directory} {keep}", resume)
        if key not in self._directories:
            wanted = dataclasses.replace(self.config.checkpoint, keep=keep, resume=resume)
            config = dataclasses.replace(self.config, checkpoint=wanted)
            self._directories[key] = Checkpoints(
                config, directory.absolute(), self.mesh, self.ranks, self._say
            )
        return self._directories[key]

    def _save(self, place: Checkpoints) -> None:
        progress = {
            "stepper": self.bound.progress(),
            "state": dataclasses.asdict(self.state),
            "epoch_sums": self._epoch_sums,
            "scheduler": outset.state_of(self.scheduler),
        }
        place.save(self.state.step, self.bare, self.bound, progress)

    def _resume(self, place: Path) -> None:
        found = ranks.gather(bool(checkpoint_store.every(place.absolute())))
        if all(found):
            self.load_checkpoint(place)
        elif any(found):
            raise CheckFailed(f"not every rank sees the checkpoints in {place}")
        else:
            self._say(f"nothing to resume from in {place}: starting anew")
