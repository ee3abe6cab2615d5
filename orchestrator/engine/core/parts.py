"""Build the sharded model, its loss and its optimizers from arguments or from a config."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from orchestrator.common.errors import UsageError, did_you_mean
from orchestrator.common.files import expand_home
from orchestrator.config.schema import Config, TrainingConfig
from orchestrator.engine.core import settings
from orchestrator.engine.core.kept import AuxiliaryState
from orchestrator.engine.core.optimizer import learning_rate_factor, optimizer_factory, parts_of
from orchestrator.engine.core.settings import TrainerSettings
from orchestrator.engine.core.step import Steppers
from orchestrator.engine.data.batch import Micro
from orchestrator.engine.models import build
from orchestrator.engine.models.import_by_name import kind_of
from orchestrator.engine.models.losses import Loss, Losses, Totals
from orchestrator.engine.observe.reporter import say_from_rank_0
from orchestrator.engine.ranks import collectives, plain_names, ranks
from orchestrator.engine.ranks.ranks import Ranks, device_name, say_once
from orchestrator.engine.saving import weights as whole_weights
from orchestrator.engine.sharding import mesh
from orchestrator.engine.sharding.blocks import Models, describe_blocks
from orchestrator.engine.sharding.mesh import Mesh

FOR_EXAMPLE = 'Trainer(models={"G": g, "D": d}, optimizers={"G": o1, "D": o2}, step=step)'


@dataclass(frozen=True)
class Parts:
    """The sharded model with its loss and its optimizers."""

    config: Config
    ranks: Ranks
    mesh: Mesh
    # `model` is sharded or wrapped by ddp; `bare` is the same without the wrapper of ddp.
    model: nn.Module
    bare: nn.Module
    losses: Loss
    steppers: Steppers

    def totals(self, model: nn.Module, micro: Micro) -> Totals:
        """Return the loss totals of a micro-batch, only for optimizers that are due."""
        return self.losses(model, micro.data, micro.drawn, self.steppers.names_due)

    @functools.cached_property
    def auxiliary(self) -> AuxiliaryState:
        """The optimizers' state, and the objects that the program keeps in checkpoints."""
        return AuxiliaryState(self.steppers)

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models by name, or a single one under the empty name."""
        return dict(self.bare) if isinstance(self.bare, Models) else {"": self.bare}

    def named(self, name: str) -> nn.Module:
        """Return one of several models by its name, or all of them for the empty name."""
        if name and name not in self.models:
            known = ", ".join(filter(None, self.models))
            fix = (
                f"there are {known}" if known else "leave model= out: there is one, without a name"
            )
            raise UsageError(f"no model is called {name!r}", fix)
        return self.models[name] if name else self.bare

    def shown(self, ema: bool | None) -> contextlib.AbstractContextManager[None]:
        """Put the requested weights into the model within a block: the average, or themselves."""
        if ema and all(stepper.average is None for stepper in self.steppers):
            raise UsageError(
                "ema=True asks for an average of the weights, and this Trainer has none",
                "Trainer(..., ema=0.999) keeps one",
            )
        return self.steppers.evaluating(average=ema is not False)

    @property
    def unit(self) -> str:
        """The name of what the loss averages over: tokens, targets or samples."""
        # A Trainer's loss is the program's own.
        if isinstance(self.losses, Losses):
            return "targets" if self.losses.counts or self.losses.step else "samples"
        model, data = self.config.model, self.config.dataset
        reads_text = data.kind in ("library", "tokens", "synthetic")
        of_tokens = model.kind == "decoder" or (model.kind == "target" and reads_text)
        return "tokens" if of_tokens else "samples"

    def introduce(self) -> None:
        """Print the ranks and devices, how the model is sharded, and the parameter count."""
        tell, everyone = functools.partial(say_from_rank_0, self.ranks), self.ranks
        tell(mesh.describe_mesh(self.mesh, everyone))
        here = everyone.neighbours
        if everyone.world > 1 and everyone.rank == here[0]:
            host = f"{everyone.nodes[everyone.rank][1]}, {device_name(everyone.device)}"
            say_once(f"ranks {here[0]} to {here[-1]} of {everyone.world} are here: {host}")
        parameters, trained = self.steppers.parameters, sum(len(s.named) for s in self.steppers)
        count = sum(parameter.numel() for parameter in parameters.values())
        tell(f"{count:,} parameters")
        if trained < len(parameters):
            tell(f"{len(parameters) - trained} of {len(parameters)} are not in the optimizer")
        if self.mesh.mesh is not None:
            tell(describe_blocks(self.model, sum(p.numel() for p in self.steppers.whole)))


# -- from the arguments of a Trainer ---------------------------------------------------------------


def parts_of_trainer(given: TrainerSettings) -> Parts:
    """Return the parts of a Trainer: shard its model and bind the optimizers to it."""
    model, optimizers, schedulers = trained_of(given)
    # The names by which an optimizer finds its parameters once the model is sharded.
    names = {id(parameter): name for name, parameter in plain_names.named_parameters(model)}
    losses = Losses(given.loss, given.step, given.metrics or {}, [*optimizers])
    config = settings.trainer_config(given)
    everyone = join_ranks(config, given.backend, given.device)
    refuse_unknown_names(optimizers, given)
    micros_asked = config.training.gradient_accumulation
    config = settings.keep_batch(
        config, everyone.world, functools.partial(say_from_rank_0, everyone)
    )
    losses.to(everyone.device)
    fill = weight_filler(model, given.weights, config, everyone)
    shape, whole = mesh.distribute_model(model, given.strategy, everyone, config, fill)
    lr_scale = 1.0
    if given.scale_lr:
        # If a restart changes the number of ranks, the micro-batches per step change inversely, so
        # the factor stays that of the first start.
        lr_scale = everyone.world * config.training.gradient_accumulation / micros_asked
        say_from_rank_0(
            everyone, f"learning rates are multiplied by {lr_scale:g}, the number of ranks"
        )
    training = {name: training_of(name, given, config.training) for name in optimizers}
    steppers = Steppers(
        optimizers,
        names,
        model,
        shape,
        training,
        given.every or {},
        schedulers,
        scheduler_every=given.scheduler_every,
        lr_factor=lambda step: lr_scale * min(1.0, step / max(1, given.warmup_steps)),
        elementwise=given.elementwise,
    )
    parts = Parts(config, everyone, shape, whole, model, losses, steppers)
    parts.introduce()
    return parts


def join_ranks(
    config: Config, backend: str | None, device: str | int | torch.device | None
) -> Ranks:
    """Join the process group; `device` may only be set for a single process."""
    settings.make_deterministic(config)
    collectives.setup_distributed(backend, config.distributed.timeout)
    everyone = ranks.join_group(config)
    if device is None:
        return everyone
    if everyone.world > 1:
        raise UsageError("device= is for one process; each of several has its own", "leave it out")
    return dataclasses.replace(everyone, device=torch.device(device))


def training_of(name: str, given: TrainerSettings, training: TrainingConfig) -> TrainingConfig:
    """Return the training settings with one optimizer's own clipping and average."""
    own: dict[str, Any] = {}
    if isinstance(given.clip_grad_norm, Mapping):
        own["grad_clip_norm"] = given.clip_grad_norm.get(name, 0.0)
    if isinstance(given.ema, Mapping):
        own["ema"] = given.ema.get(name)
    return dataclasses.replace(training, **own)


# -- from a config ---------------------------------------------------------------------------------


def parts_of_config(config: Config, everyone: Ranks) -> Parts:
    """Return the parts that a config describes: build, shard and fill its model."""
    config = settings.keep_batch(
        config, everyone.world, functools.partial(say_from_rank_0, everyone)
    )
    model = build.build_model(config)
    optimizer = optimizer_factory(config, model)
    fill = weight_filler(model, config.model.weights, config, everyone)
    shape, whole = mesh.distribute_model(
        model, config.fsdp.sharding_strategy, everyone, config, fill
    )
    steppers = Steppers(
        {"": optimizer},
        {},
        model,
        shape,
        {"": config.training},
        {},
        {},
        lr_factor=lambda step: learning_rate_factor(
            config.scheduler, step, config.training.max_steps
        ),
        nominal=build.nominal_count(config, everyone.world),
        keeps_settings=True,
    )
    parts = Parts(config, everyone, shape, whole, model, build.loss_of(config), steppers)
    parts.introduce()
    return parts


def weight_filler(
    model: nn.Module, weights: str | Path | None, config: Config, everyone: Ranks
) -> Callable[[], None] | None:
    """Return a function that fills a sharded model from a file or the seed, or None for neither."""
    target = torch.device("cpu") if config.fsdp.cpu_offload else everyone.device
    if weights is not None:
        whole_weights.refuse_unreadable(model, as_path(weights))
    elif not build.is_built_in(model):
        return None

    def fill() -> None:
        if build.is_built_in(model):
            build.initialise_model(model, config.training.seed, target)
        elif mesh.is_on_meta(model):
            mesh.give_memory(model, target)
        if weights is not None:
            whole_weights.load_weights(model, as_path(weights))

    return fill


def as_path(directory: str | Path) -> Path:
    return Path(expand_home(directory)).absolute()


# -- one model, or several by name -----------------------------------------------------------------


# The model and the optimizers and schedulers by name: one of each under the empty name, or several.
Trained = tuple[nn.Module, Mapping[str, Any], Mapping[str, Any]]


def trained_of(given: TrainerSettings) -> Trained:
    """Return the model, optimizer and scheduler of a Trainer, or several of each by name."""
    several = given.models, given.optimizers, given.schedulers
    if all(each is None for each in several):
        if given.model is None or given.optimizer is None:
            lacking = "a model" if given.model is None else "an optimizer"
            raise UsageError(
                f"a Trainer needs {lacking}", f"Trainer(model, optimizer, loss), or {FOR_EXAMPLE}"
            )
        return given.model, {"": given.optimizer}, {"": given.scheduler}
    one = any(each is not None for each in (given.model, given.optimizer, given.scheduler))
    if one or not given.models or not given.optimizers:
        raise UsageError(
            "models= and optimizers= go together, in place of a model and an optimizer",
            f"Trainer(model, optimizer, loss), or {FOR_EXAMPLE}",
        )
    return several_by_name(given.models, given.optimizers, given.schedulers or {})


def refuse_unknown_names(optimizers: Mapping[str, Any], given: TrainerSettings) -> None:
    """Refuse arguments that name an unknown optimizer, and an every= without one in each step."""
    for what in ("every", "schedulers", "clip_grad_norm", "ema"):
        values = getattr(given, what)
        for name in values if isinstance(values, Mapping) else ():
            if name not in optimizers:
                raise UsageError(
                    f"{what}= has {name!r}, and no optimizer has that name"
                    f"{did_you_mean(str(name), [*optimizers])}",
                    f"the optimizers are {', '.join(filter(None, optimizers)) or 'one, unnamed'}",
                )
    if given.every and all(given.every.get(name, 1) > 1 for name in optimizers):
        raise UsageError(
            "every= leaves steps in which no optimizer steps",
            "let one of them step in each: leave it out of every=",
        )


def several_by_name(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, Any], schedulers: Mapping[str, Any]
) -> Trained:
    """Return several models as one. Refuse a parameter in two optimizers; freeze those in none."""
    model = Models(models)
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    # The name of the optimizer of each parameter.
    trained: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        for parameter in parameters_of(name, optimizer, model):
            if (other := trained.setdefault(id(parameter), name)) != name:
                raise UsageError(
                    f"{names[id(parameter)]} is in two optimizers, {other!r} and {name!r}",
                    "leave it to one of them; a loss of another one still flows through it",
                )
    for parameter in model.parameters():
        if id(parameter) not in trained:
            # ddp would wait for its gradient.
            parameter.requires_grad_(False)
    return model, optimizers, schedulers


def parameters_of(name: str, optimizer: Any, model: nn.ModuleDict) -> list[nn.Parameter]:
    """Return the parameters of an optimizer; a function's are those of the model of its name."""
    parts = parts_of(optimizer)
    if all(isinstance(part, Optimizer) for part in parts):
        return [p for part in parts for group in part.param_groups for p in group["params"]]
    if callable(optimizer) and name in model:
        return [parameter for parameter in model[name].parameters() if parameter.requires_grad]
    raise UsageError(
        f"optimizers[{name!r}] is {kind_of(optimizer)}",
        "give an optimizer over the parameters; or, by the name of a model, a function of its"
        f" parameters (there are {', '.join(model)})",
    )
