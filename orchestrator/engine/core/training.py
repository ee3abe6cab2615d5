"""One training: a model with its data, its reports and its checkpoints, and the calls on them.

A Trainer makes one from its arguments, and the built-in engine from a config.
"""

from __future__ import annotations

from typing import Any

from orchestrator.engine.core.checkpointing import Checkpointing
from orchestrator.engine.core.loop import Loop, evaluate_model
from orchestrator.engine.core.parts import Parts
from orchestrator.engine.core.settings import Data, TrainerSettings, data_of, request_of
from orchestrator.engine.core.stopping import Metrics, StopPolicy, TrainingRequest
from orchestrator.engine.data.batch import Batches
from orchestrator.engine.data.sharded_loader import Shard, share_of_loader
from orchestrator.engine.models import build
from orchestrator.engine.observe.reporter import Reporter, Reporting
from orchestrator.engine.ranks.randomness import randomness_kept


class Training:
    """Trains and evaluates the model of its parts.

    Hooks are called with `settings`, which is the Trainer itself. `data` is that of a config, if
    there is one.
    """

    def __init__(self, made: Parts, given: TrainerSettings, data: Data = (None, None)) -> None:
        self.parts, self.settings, self.data = made, given, data
        self.reporting = Reporting(made.ranks, given.trackers)
        built_in = data[0] is not None
        self.saving = Checkpointing(made, self.reporting.say, built_in=built_in)
        # This is only set while train() runs.
        self.policy: StopPolicy | None = None

    def train(
        self,
        asked: TrainingRequest | None = None,
        train_loader: Any = None,
        val_loader: Any = None,
    ) -> list[Metrics]:
        """Train as requested, by default as the config says; return the history of epochs."""
        asked = asked or request_of(self.parts.config, {}, built_in=True)
        loaders = (train_loader, val_loader)
        training, held_out = data_of(asked, self.data, loaders, self._shared)
        self.saving.begin(asked, training)
        say, state = self.reporting.say, self.saving.state
        self.policy = policy = StopPolicy(state, asked)
        say(f"training on {training.description}")
        self.saving.say_where()
        if policy.nothing_to_do():
            self.saving.end_with_nothing_done()
        else:
            state.ended = ""
            self.reporting.trackers.begin(self.saving.run.id, state.step)
            reporter = self._reporter(training, policy)
            Loop(self.parts, self.saving, training, held_out, policy, reporter, self.settings).run()
        self.policy = None
        return state.history

    def evaluate(self, loader: Any) -> Metrics:
        """Return the mean metrics over the samples of all ranks, each counted once."""
        with randomness_kept():
            metrics = evaluate_model(self.parts, self._shared(loader, "loader"))
        assert metrics is not None
        return metrics

    def _shared(self, loader: Any, name: str) -> Shard:
        seed = self.parts.config.training.seed
        return share_of_loader(loader, self.parts.ranks, seed, self.settings.stream, name)

    def _reporter(self, training: Batches, policy: StopPolicy) -> Reporter:
        made, state, config = self.parts, self.saving.state, self.parts.config
        size, micros = training.batch_size, config.training.gradient_accumulation
        flops = build.flops_per_sample(config, made.bare) if self.saving.built_in else None
        flops = flops or build.stated_flops(made.bare)
        reporter = Reporter(
            config,
            made.ranks,
            made.model,
            self.reporting,
            step=state.step,
            tokens=state.tokens,
            unit=made.unit,
            trainer=self.saving.number,
            max_steps=policy.max_steps,
            flops_per_step=flops and size and flops * size * micros,
            left=lambda: (
                policy.steps_left(training.samples, training.round_size * micros),
                policy.seconds_left,
            ),
        )
        reporter.epoch_sums = state.epoch_sums
        return reporter
