"""The built-in training run, one process per rank. Read it from top to bottom.

Started by torchrun on every node: through `master_launch` without a script, or by hand as
`torchrun ... -m orchestrator.engine.train --config FILE`; or by srun, which needs no torchrun.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.config import load, parse
from orchestrator.config.schema import Config
from orchestrator.engine.core import stop_vote
from orchestrator.engine.core.optim import Stepper
from orchestrator.engine.data import dataset, sources
from orchestrator.engine.data.sample_order import Order
from orchestrator.engine.models import build
from orchestrator.engine.observe.profile import Profile
from orchestrator.engine.observe.reporter import Run, announce, due, say
from orchestrator.engine.ranks import mesh, slurm_ranks
from orchestrator.engine.ranks.ranks import Ranks, joined
from orchestrator.engine.saving.checkpoint import Checkpoints
from orchestrator.errors import CheckFailed, OrchestratorError


def main() -> None:
    try:
        config = read_config()
        settle(config)
        slurm_ranks.take_place()
        with joined(config) as ranks:
            train(config, ranks)
    except OrchestratorError as error:
        raise SystemExit(str(error)) from None  # in words; what a user's own code raises is a trace


def train(config: Config, ranks: Ranks) -> None:
    training = config.training

    # -- the model, spread over the ranks -----------------------------------------------------

    shape = mesh.make(config, ranks)
    model = build.build(config)
    place = torch.device("cpu") if config.fsdp.cpu_offload else ranks.device
    fill = functools.partial(build.initialise, model, training.seed, place)
    spread = mesh.spread(model, shape, ranks, config, fill)
    loss_of = build.loss_of(config)

    # -- the samples, in one order for all ranks ----------------------------------------------

    source, held_out = sources.sources(config, ranks.device)
    order = Order(len(source), training.seed, shuffle=config.dataset.shuffle)
    per_micro = ranks.world * training.batch_size
    per_step = per_micro * training.gradient_accumulation
    stepper = Stepper(config, model, shape, build.nominal_count(config, ranks.world))

    # -- where it begins: at the beginning, or where a checkpoint left off --------------------

    announce(config, ranks, shape, model, len(source))
    outputs = outputs_directory()
    checkpoints = Checkpoints.of_run(config, outputs, shape, ranks, functools.partial(say, ranks))
    saved = checkpoints.resume(model, stepper) if checkpoints else None
    step = saved["step"] if saved else 0
    position = saved["position"] if saved else 0  # samples seen by all ranks together
    run = Run(config, ranks, spread, step, saved["tokens"] if saved else 0, per_step)

    def save() -> None:
        assert checkpoints is not None
        run.flush()
        state = {"step": step, "position": position, "tokens": run.tokens}
        with run.estimate.pause():
            checkpoints.save(step, model, stepper, {**state, "stepper": stepper.progress()})

    def evaluate() -> None:
        assert held_out is not None
        with run.estimate.pause():
            found = evaluation(config, ranks, spread, loss_of, held_out, run)
            run.say_evaluation(step, found)

    # -- the loop -----------------------------------------------------------------------------

    feed = dataset.batches(source, order, config, ranks.rank, ranks.world, position)
    run.asked.listen()
    with Profile(config.profiling, outputs, ranks, run.say) as profile:
        while step < training.max_steps and not run.ending:
            step += 1
            run.asked.send()  # who wants to stop, save, evaluate: told while the step computes
            loss = count = torch.zeros((), dtype=torch.float64, device=ranks.device)
            for micro in range(training.gradient_accumulation):
                with run.phases("data"):
                    batch = next(feed)
                    data = to_device(batch.data, ranks.device)
                last = micro == training.gradient_accumulation - 1
                seed_all(training.seed, step, micro, ranks.rank)
                with (
                    run.phases("forward_backward"),
                    mesh.backward(spread, shape, config, last=last),
                ):
                    with mesh.computing(shape, ranks, config):
                        sums = loss_of(spread, data)
                    run.phases.backward(stepper.scaled(sums.loss))
                run.ledger.add(batch.ids, sums.loss.detach())
                loss, count = loss + sums.loss.detach(), count + sums.count
            with run.phases("exposed_comm"):
                sums_of_all = stepper.add_up(loss, count)
            with run.phases("optimizer"):
                run.ledger.close(step, stepper.step(step, sums_of_all), stepper.lr(step))
            position += per_step
            with run.estimate.pause():  # writing a trace takes its time
                profile.step()

            stop, out_of_time, save_now, evaluate_now, _ = run.asked.agreed()
            run.after(step, stop=stop, out_of_time=out_of_time)
            if checkpoints:
                checkpoints.poll()
            if held_out is not None and (evaluate_now or due(training.eval_steps, step)):
                evaluate()
            if checkpoints and (save_now or due(config.checkpoint.steps, step)):
                save()

    if checkpoints:
        if config.checkpoint.at_end and checkpoints.last_saved != step:
            save()
        checkpoints.wait()
    run.end(step)


# -- the parts of it, in the order in which they are used -----------------------------------------


def evaluation(
    config: Config,
    ranks: Ranks,
    model: nn.Module,
    loss_of: build.Loss,
    source: sources.Source,
    run: Run,
) -> dict[str, float] | None:
    """Means over the held-out samples, each counted once; None if somebody asks to stop."""
    sums: dict[str, Tensor] = {}
    model.eval()
    with torch.no_grad(), contextlib.ExitStack() as after:
        after.callback(mesh.shards_again, model)
        after.callback(model.train)
        for batch, real in dataset.evaluation(source, config, ranks.rank, ranks.world):
            run.goes_on()
            if run.asked.now()[stop_vote.STOP]:
                return None
            found = loss_of(model, to_device(batch.data, ranks.device))
            for name, value in {"loss": found.loss, "count": found.count, **found.extra}.items():
                kept = value.double() if real else torch.zeros_like(value, dtype=torch.float64)
                sums[name] = sums.get(name, 0) + kept
    totals = torch.stack(list(sums.values()))
    dist.all_reduce(totals)
    values = dict(zip(sums, totals.tolist(), strict=True))
    count = values.pop("count")
    return {name: value / count for name, value in values.items()}


# -- small things, in the order of their use ------------------------------------------------------


def read_config() -> Config:
    """What the launch resolved, from the run directory on this node; by hand, from a YAML file."""
    parser = argparse.ArgumentParser(description="Train with the built-in engine.")
    parser.add_argument("--config", type=Path, help="a YAML file (needs PyYAML)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    run = os.environ.get("ORCHESTRATOR_RUN")
    if options.config is None and run:
        spec = json.loads(Path(run, "spec.json").read_text(encoding="ascii"))
        return parse.build(Config, spec["config"])
    return load.load(options.config, options.set)


def settle(config: Config) -> None:
    """What has to be so before anything is computed."""
    if importlib.util.find_spec("numpy") is None:
        raise CheckFailed(
            f"the engine needs numpy beside torch, and {sys.executable} has none",
            "torch's collectives of objects, and so its checkpoints, use it: pip install numpy",
        )
    sys.path.insert(0, str(Path.cwd()))  # a model.target of the user lies where the job was started
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def outputs_directory() -> Path | None:
    """Without an experiment (torchrun by hand) there is none."""
    experiment = os.environ.get("ORCHESTRATOR_EXPERIMENT")
    return Path(experiment, "outputs") if experiment else None


def to_device(data: Any, device: torch.device) -> Any:
    """Tensors in whatever a user's dataset makes of them."""
    if isinstance(data, Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, dict):
        return {name: to_device(value, device) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [to_device(value, device) for value in data]
    return data


def seed_all(seed: int, step: int, micro: int, rank: int) -> None:
    """Randomness is a function of where we are, so that a resume needs no saved state of it."""
    number = hash((seed, step, micro, rank)) & 0xFFFF_FFFF  # of ints: the same in every process
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


if __name__ == "__main__":
    main()
