"""The one loop: batches in, optimizer steps out, until the stop policy ends it.

The training itself is `Loop.run`, `_epoch`, `_micro` and `_step`. Logging, evaluations, checkpoints
and the end, which happen between two steps, are in `_after_step`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.common.errors import UsageError
from orchestrator.engine.core.checkpointing import Checkpointing
from orchestrator.engine.core.parts import Parts
from orchestrator.engine.core.settings import Hook, TrainerSettings, outputs_directory
from orchestrator.engine.core.stopping import KEEP, PROFILE, Metrics, StopPolicy, TrainState
from orchestrator.engine.data.batch import (
    Batches,
    BatchStream,
    Micro,
    to_device,
)
from orchestrator.engine.models.losses import Totals
from orchestrator.engine.observe.profile import Profile
from orchestrator.engine.observe.reporter import Reporter, means_of
from orchestrator.engine.ranks.randomness import Randomness, seed_all
from orchestrator.engine.ranks.ranks import gather_values
from orchestrator.engine.sharding import mesh
from orchestrator.engine.sharding.copies import autocast


@dataclass
class Loop:
    """One call of train()."""

    parts: Parts
    saving: Checkpointing
    training: Batches
    held_out: Batches | None
    policy: StopPolicy
    reporter: Reporter
    # The Trainer, whose hooks are called on every rank.
    trainer: TrainerSettings
    # The names of all losses and metrics so far.
    names: tuple[str, ...] = ()
    # The names that the step gave, by the optimizers that were due.
    given: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    # The sum and the count of each name, on this rank in this step.
    sums: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    # The ranks vote after a step, not at its beginning.
    votes_late: bool = False

    @property
    def state(self) -> TrainState:
        return self.saving.state

    def run(self) -> None:
        state, ranks, say = self.state, self.parts.ranks, self.reporter.say
        config = self.parts.config
        profiling = config.profiling.within(config.training.max_steps)
        self.users = Randomness.now()
        with (
            contextlib.ExitStack() as after,
            self.policy.vote.listening(),
            Profile(
                profiling,
                outputs_directory(),
                ranks,
                say,
                marks=self.reporter.phases.mark,
                before=state.step,
            ) as self.profile,
        ):
            after.callback(self.reporter.file.close)
            # The attribute has another value by then.
            after.callback(lambda: self.users.restore())  # noqa: PLW0108
            if self.saving.checkpoints is not None:
                after.callback(self.saving.checkpoints.close)
            for model in self.parts.models.values():
                # Libraries give models in eval mode. The mode of a part is the program's.
                if not model.training and any(p.requires_grad for p in model.parameters()):
                    model.train()
            # A hook's result counts after its step, so the vote follows it. Without a hook the vote
            # overlaps with the step's computation.
            self.votes_late = any(
                gather_values(ranks.world == 1 or self.trainer.on_step_end is not None)
            )
            self.parts.steppers.find_whole()
            self._call(self.trainer.on_train_begin)
            self.policy.before_first_step()
            trains = not state.ended
            while not state.ended:
                self._epoch()
            self._close(trains=trains)
            self.reporter.account.write()
        say(f"{state.ended} (step {state.step})")

    def _close(self, *, trains: bool) -> None:
        """Save the last state, unless the training ended before its first step; end the stores."""
        memory, checkpoints = self.saving.memory, self.saving.checkpoints
        if memory is not None:
            # A training that was asked to stop may be restarted from this state.
            if trains and self.policy.urgent:
                with self._up_to_date():
                    self.saving.keep_in_memory(last=True)
            memory.end()
        if checkpoints is not None:
            if trains:
                with self._up_to_date():
                    self.saving.save_last()
            self.reporter.saves(self.state.step, checkpoints.saved)
            checkpoints.leave()

    def _epoch(self) -> None:
        """Train one epoch, or what is left of it."""
        state, config = self.state, self.parts.config
        batches = BatchStream(self.training.epoch(state.epoch, state.position))
        # The number of the micro-batch in its step.
        index = 0
        while (micro := self._next(batches)) is not None:
            if index == 0:
                self.parts.steppers.begin(state.step + 1)
            if index == 0 and not self.votes_late:
                # The requests of all ranks travel while the step computes.
                self._vote()
            complete = index + 1 == config.training.gradient_accumulation or self._over(batches)
            self._micro(micro, index, complete=complete)
            state.batch, state.position = state.batch + 1, state.position + self.training.round_size
            index += 1
            if not complete:
                continue
            self._step()
            index = 0
            if self._over(batches):
                break
            self._after_step(epoch_over=False)
            if state.ended:
                return
        self._after_step(epoch_over=True)

    def _over(self, batches: BatchStream) -> bool:
        with self.reporter.phases("data"):
            return not self.training.endless and batches.over()

    def _next(self, batches: BatchStream) -> Micro | None:
        with self.reporter.phases("data"):
            micro = batches.next()
            if micro is None:
                return None
            return micro._replace(data=to_device(micro.data, self.parts.ranks.device))

    def _micro(self, micro: Micro, index: int, *, complete: bool) -> None:
        """Run forward and backward; `complete` sums the gradients over the ranks."""
        parts, phases = self.parts, self.reporter.phases
        config, ranks = parts.config, parts.ranks
        alone = parts.steppers.sums_itself
        seed_all(config.training.seed, self.state.step + 1, index, ranks.rank)
        with (
            phases("forward_backward"),
            mesh.backward_pass(parts.model, parts.mesh, config, last=complete and not alone),
        ):
            with autocast(config.training.mixed_precision, ranks.device):
                totals = mesh.as_forward(parts.model, lambda model: parts.totals(model, micro))
            parts.steppers.backward(totals, phases.backward, real=micro.real)
        if micro.real:
            self.reporter.ledger.micros.append((micro.ids, totals["loss"][0].detach()))
        add_totals(self.sums, totals, real=micro.real)

    def _step(self) -> None:
        """Sum gradients, losses and counts over all ranks, and take the optimizer step."""
        steppers, phases, state = self.parts.steppers, self.reporter.phases, self.state
        self._check_names()
        state.step += 1
        with phases("exposed_comm"):
            total, apart = steppers.add_up(self.sums)
        with phases("optimizer"):
            report = steppers.step(state.step, self.names, total, apart)
        self.reporter.ledger.close(report)
        self.saving.refuse_unsaved()
        self.sums = {}
        for stepper in steppers.due:
            stepper.scheduler.after_step()
        self._call(self.trainer.on_step_end)
        if self.votes_late:
            self._vote()
        # Writing a trace is slow, so it does not count as step time.
        with self.reporter.estimate.pause():
            self.profile.step()

    def _vote(self) -> None:
        if steps := self.profile.wanted():
            self.policy.vote.request(PROFILE, steps)
        memory = self.saving.memory
        if self.policy.first and memory is not None and memory.due_by_clock():
            self.policy.vote.request(KEEP)
        self.policy.vote.post()

    def _call(self, hook: Hook | None) -> None:
        """Call a user's callback with its own random state; request the end if it returns True."""
        if hook is None:
            return
        self.users.restore()
        with self.reporter.estimate.pause():
            enough = hook(self.trainer)
        self.users = Randomness.now()
        if is_true(enough):
            self.policy.request_end()

    def _check_names(self) -> None:
        """Check that the step gives the same names as before, and fill in zeros for absent ones.

        Losses of optimizers that are not due are absent from a step.
        """
        names, steppers = tuple(self.sums), self.parts.steppers
        before = self.given.setdefault(steppers.names_due, names)
        if before is names:
            self.names = tuple(dict.fromkeys([*self.names, *names]))
            if steppers.all_due:
                self.policy.best.refuse_unknown(self._names_of_values())
            refuse_other_names(names)
        elif names != before:
            raise UsageError(
                f"the step gave {', '.join(before)} before, and now {', '.join(names)}",
                "give the same metrics for every batch, in the same order",
            )
        if names != self.names:
            nothing = (torch.zeros_like(self.sums["loss"][0]),) * 2
            self.sums = {name: self.sums.get(name, nothing) for name in self.names}

    def _names_of_values(self) -> list[str]:
        """Return the names of all metrics that evaluations and epochs will report."""
        kinds = [] if self.training.endless else ["train"]
        if self.held_out is not None:
            kinds += ["eval"] if self.policy.evaluating else []
            kinds += [] if self.training.endless else ["val"]
        return [f"{kind}_{name}" for kind in kinds for name in self.names]

    # -- between steps ----------------------------------------------------------------------------

    def _after_step(self, *, epoch_over: bool) -> None:
        state, policy, reporter = self.state, self.policy, self.reporter
        if epoch_over:
            state.epoch, state.batch, state.position = state.epoch + 1, 0, 0
        policy.after_step(epoch_over=epoch_over)
        whole, over = self.training.samples, state.epoch
        if self.training.endless and whole:
            over = state.position // whole
        reporter.after_step(state.step, over, last=bool(state.ended) and self.training.endless)
        state.tokens = reporter.tokens
        memory, checkpoints = self.saving.memory, self.saving.checkpoints
        if checkpoints is not None:
            checkpoints.poll()
            reporter.saves(state.step, checkpoints.saved)
        with reporter.estimate.pause():
            if epoch_over or (state.ended and not self.training.endless):
                self._close_epoch(whole=epoch_over)
            elif policy.evaluate and self.held_out is not None and (values := self._evaluate()):
                state.val_metrics = values
                reporter.evaluation(state.step, over, values)
                policy.compare({f"eval_{name}": value for name, value in values.items()})
            if epoch_over:
                policy.after_epoch()
            if policy.save:
                with self._up_to_date():
                    self.saving.save()
        if policy.profile and not state.ended:
            with reporter.estimate.pause():
                self.profile.begin(policy.profile, state.step)
        if memory is not None and (policy.keep or memory.due(state.step)):
            with self._up_to_date():
                self.saving.keep_in_memory()

    @contextlib.contextmanager
    def _up_to_date(self) -> Iterator[None]:
        """Flush the reporter before the block saves; its time counts as saving, not as a step."""
        with self.reporter.account.saving(), self.reporter.estimate.pause():
            self.reporter.flush()
            self.state.tokens = self.reporter.tokens
            yield

    def _close_epoch(self, *, whole: bool) -> None:
        """Report the metrics of an epoch, or of a part of one, and validate.

        An urgent end skips the validation, because the checkpoint comes first.
        """
        state, reporter = self.state, self.reporter
        reporter.flush()
        state.tokens = reporter.tokens
        state.train_metrics = means_of(
            {name: (pair[0], pair[1]) for name, pair in state.epoch_sums.items()}
        )
        if whole:
            state.epoch_sums.clear()
        values = {f"train_{name}": value for name, value in state.train_metrics.items()}
        validated = None if self.policy.urgent or self.held_out is None else self._evaluate()
        if validated is not None:
            state.val_metrics = validated
            values |= {f"val_{name}": value for name, value in validated.items()}
        state.add_to_history({"epoch": state.epoch, "step": state.step, **values})
        reporter.epoch(state.step, state.epoch, values, whole=whole)
        if whole and (metrics := validated or state.train_metrics):
            for stepper in self.parts.steppers:
                stepper.scheduler.after_epoch(metrics.get(stepper.loss))
        if whole:
            self.policy.compare(values)
        self._call(self.trainer.on_epoch_end)

    def _evaluate(self) -> Metrics | None:
        assert self.held_out is not None

        def stop() -> bool:
            self.reporter.alive()
            return self.policy.stop_requested()

        return evaluate_model(self.parts, self.held_out, stop)


def is_true(result: Any) -> bool:
    """Return True if a hook returned True, as a bool of Python, numpy or torch.

    Other results are ignored, such as the metrics that a lambda returns from an evaluation.
    """
    return bool(result) if str(getattr(result, "dtype", "")).endswith("bool") else result is True


def evaluate_model(
    parts: Parts, held_out: Batches, stop: Callable[[], bool] = lambda: False
) -> Metrics | None:
    """Return the means over all ranks' samples, each counted once; None if a rank asks to stop."""
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    model, ranks, config = parts.model, parts.ranks, parts.config
    with parts.steppers.evaluating(), mesh.evaluation_mode(model), torch.no_grad():
        for micro in itertools.islice(held_out.epoch(0), config.training.eval_batches):
            if stop():
                return None
            batch = to_device(micro.data, ranks.device)
            with autocast(config.training.mixed_precision, ranks.device):
                totals = mesh.as_forward(
                    model,
                    lambda own: parts.losses(own, batch, micro.drawn),  # noqa: B023
                )
                add_totals(sums, totals, real=micro.real)
    refuse_other_names(tuple(sums))
    total = torch.stack([value for pair in sums.values() for value in pair])
    if ranks.world > 1:
        dist.all_reduce(total)
    pairs = zip(sums, total[::2].tolist(), total[1::2].tolist(), strict=True)
    return {name: value / count if count else math.nan for name, value, count in pairs}


def add_totals(sums: dict[str, tuple[Tensor, Tensor]], totals: Totals, *, real: bool) -> None:
    """Add totals in double precision; those of padding (not `real`) count as zero."""
    for name, (total, count) in totals.items():
        pair = total.detach().double(), count.to(total.device).double()
        if not real:
            pair = torch.zeros_like(pair[0]), torch.zeros_like(pair[1])
        before = sums.get(name)
        sums[name] = pair if before is None else (before[0] + pair[0], before[1] + pair[1])


def refuse_other_names(names: tuple[str, ...]) -> None:
    """Refuse ranks that give different metrics: the all-reduce sums them by position."""
    for rank, other in enumerate(gather_values(names)):
        if other != names:
            raise UsageError(
                f"the step gives {', '.join(names)} on this rank, {', '.join(other)} on rank"
                f" {rank}",
                "give the same metrics everywhere",
            )
