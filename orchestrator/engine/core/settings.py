"""Choose the settings of a training: the keys that a Trainer honours, its strategy, its batch."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from orchestrator.common.errors import UsageError, nearest
from orchestrator.common.text import Say, plural
from orchestrator.config import parse
from orchestrator.config.parse import at_least, one_of
from orchestrator.config.schema import SHARDED, Config, Training
from orchestrator.engine.core.together import one_of_several
from orchestrator.engine.models.import_by_name import kind
from orchestrator.engine.ranks.ranks import Ranks, free_host_memory, gather
from orchestrator.engine.sharding import several

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


def check_arguments(
    strategy: str, scheduler_every: str, stream: str, warmup_steps: int, log_every: int | None
) -> None:
    one_of("strategy", strategy, STRATEGIES)
    one_of("scheduler_every", scheduler_every, ("step", "epoch"))
    one_of("stream", stream, ("dealt", "own"))
    at_least("warmup_steps", warmup_steps, 0)
    at_least("log_every", log_every, 1)


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


# -- what is trained ------------------------------------------------------------------------------


FOR_EXAMPLE = 'Trainer(models={"G": g, "D": d}, optimizers={"G": o1, "D": o2}, step=step)'
Each = float | Mapping[str, float] | None  # of all optimizers, or by their names


@dataclass(frozen=True)
class Trained:
    """The model and the optimizers of a Trainer: one of each, without a name, or several."""

    model: nn.Module
    optimizers: Mapping[str, Any]
    schedulers: Mapping[str, Any]
    every: Mapping[str, int] = field(default_factory=dict)  # steps between two of an optimizer
    elementwise: bool = False  # the program says so of its own optimizers

    def seldom(self, every: Mapping[str, int] | None, elementwise: bool) -> Trained:
        """Let some optimizers step in every so many steps only."""
        refuse_unknown("every=", every or {}, self.optimizers)
        for name, steps in (every or {}).items():
            whole_number(f"every[{name!r}]", steps)
        if every and all(every.get(name, 1) > 1 for name in self.optimizers):
            raise UsageError(
                "every= leaves steps in which no optimizer steps",
                "let one of them step in each: leave it out of every=",
            )
        return dataclasses.replace(self, every=every or {}, elementwise=elementwise)

    @staticmethod
    def of_one(model: Any, optimizer: Any, scheduler: Any) -> Trained:
        if model is None or optimizer is None:
            raise UsageError(
                f"a Trainer needs {'a model' if model is None else 'an optimizer'}",
                f"Trainer(model, optimizer, loss), or {FOR_EXAMPLE}",
            )
        return Trained(model, {"": one_of_several(optimizer)}, {"": scheduler})

    @staticmethod
    def of_several(
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Any] | None,
        schedulers: Mapping[str, Any] | None,
    ) -> Trained:
        """Check that each optimizer trains parameters of these models, that no other one trains."""
        model = several.together(models)
        if not isinstance(optimizers, Mapping) or not optimizers:
            raise UsageError("models= goes with optimizers=, by name", FOR_EXAMPLE)
        optimizers = {name: one_of_several(each) for name, each in optimizers.items()}
        names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
        trained: dict[int, str] = {}  # by which
        for name, optimizer in optimizers.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise UsageError(f"optimizers= has the name {name!r}", "take letters, digits and _")
            for parameter in parameters_of(name, optimizer, model):
                if id(parameter) not in names:
                    raise UsageError(
                        f"optimizers[{name!r}] holds a parameter of shape {tuple(parameter.shape)}"
                        " that is in none of the models",
                        "make it from the parameters of the very models that you give in models=",
                    )
                if (other := trained.setdefault(id(parameter), name)) != name:
                    raise UsageError(
                        f"{names[id(parameter)]} is in two optimizers, {other!r} and {name!r}",
                        "leave it to one of them; a loss of another one still flows through it",
                    )
        refuse_unknown("schedulers=", schedulers or {}, optimizers)
        for parameter in model.parameters():
            if id(parameter) not in trained:
                parameter.requires_grad_(False)  # ddp would wait for its gradient
        return Trained(model, optimizers, schedulers or {})

    def settings(self, training: Training, clip: Each, ema: Each) -> dict[str, Training]:
        """Give each optimizer its own clipping and average."""
        found = {}
        for name in self.optimizers:
            own: dict[str, float | None] = {}
            if isinstance(clip, Mapping):
                refuse_unknown("clip_grad_norm=", clip, self.optimizers)
                own["grad_clip_norm"] = clip.get(name, 0.0)
            if isinstance(ema, Mapping):
                refuse_unknown("ema=", ema, self.optimizers)
                own["ema"] = ema.get(name)
            found[name] = dataclasses.replace(training, **own)  # type: ignore[arg-type]
        return found


def trained(
    one: tuple[Any, Any, Any], by_name: tuple[Any, Any, Any], strategy: str, keys: Any
) -> Trained:
    """Take (model, optimizer, scheduler), or the same by names."""
    if by_name == (None, None, None):
        return Trained.of_one(*one)
    given = [what for what, value in zip(("a model", "optimizer=", "scheduler="), one, strict=True)
             if value is not None]  # fmt: skip
    if given or by_name[0] is None:
        raise UsageError(
            f"{given[0] if given else 'optimizers= or schedulers='} does not go with"
            f" {'models=, optimizers= and schedulers=' if given else 'a single model'}",
            f"Trainer(model, optimizer, loss), or {FOR_EXAMPLE}",
        )
    refuse_unfit_for_several(strategy, keys or {})
    return Trained.of_several(*by_name)


def whole_number(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise UsageError(f"{name} is {value!r}", "give a whole number of steps, 1 or more")


def parameters_of(name: str, optimizer: Any, model: nn.ModuleDict) -> list[nn.Parameter]:
    """List what an optimizer trains; one that the Trainer makes trains the model of its name."""
    if isinstance(optimizer, Optimizer):
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if callable(optimizer) and name in model:
        return [parameter for parameter in model[name].parameters() if parameter.requires_grad]
    known = ", ".join(model)
    raise UsageError(
        f"optimizers[{name!r}] is {kind(optimizer)}, not an optimizer of torch's" if
        not callable(optimizer) else
        f"optimizers[{name!r}] is a function of the parameters, and no model is called {name!r}"
        f" (there are {known})",
        "give an optimizer over the parameters; or, by the name of a model, a function of its"
        " parameters",
    )  # fmt: skip


def refuse_unknown(what: str, named: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name in named:
        if name not in known:
            raise UsageError(
                f"{what} has {name!r}, and no optimizer has that name"
                f"{nearest(str(name), [*known])}",
                f"the optimizers are {', '.join(filter(None, known)) or 'one, without a name'}",
            )


def refuse_unfit_for_several(strategy: str, keys: Mapping[str, Any]) -> None:
    if strategy == "dp" or keys.get("distributed", {}).get("static_graph"):
        what = 'strategy="dp"' if strategy == "dp" else "distributed.static_graph"
        raise UsageError(f"{what} takes one loss per step, and models= has several", "leave it out")


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
