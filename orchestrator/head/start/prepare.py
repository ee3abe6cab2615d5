"""Prepare a job on the nodes that were reached: its directory, and what each node will run."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from orchestrator.common import interrupt
from orchestrator.common.errors import OrchestratorError
from orchestrator.head.plan.model import Plan
from orchestrator.head.start import payload, selection
from orchestrator.head.start.nodes import Nodes
from orchestrator.head.start.planning import make_plan
from orchestrator.head.start.request import Request
from orchestrator.records.experiment import Experiment
from orchestrator.records.experiments import check_name


@dataclass(frozen=True)
class Prepared:
    """A job that can be started: its nodes, its directory, and what each node will run."""

    request: Request
    nodes: Nodes
    experiment: Experiment
    plan: Plan
    times: dict[str, float] = field(default_factory=dict)  # when each step of the start was done


def prepare(request: Request, nodes: Nodes, *, dry_run: bool = False) -> Prepared:
    """Make the experiment's directory and plan the job; a dry run makes no directory."""
    now = time.time()
    times = {"begin": request.begun, "reached": nodes.at or now, "synced": now}
    nodes = selection.choose(request, nodes)
    if request.payload is not None:
        payload.check_python(nodes.probed)
    root, name = request.where.experiments, request.config.launch.name
    if dry_run:
        check_name(name)
        job = f"{name}_dry-run"
        experiment = Experiment(root.absolute() / job)
    else:
        interrupt.hold()
        experiment = nodes.source.experiment(root, name)
        interrupt.undo_with(experiment.discard)  # until the job is recorded
        interrupt.answer_now()
        job = f"{experiment.name}-{secrets.token_hex(3)}"
    with contextlib.nullcontext() if dry_run else discarded_on_error(experiment):
        plan = make_plan(request, nodes, job, str(experiment.path))
    return Prepared(request, nodes, experiment, plan, {**times, "planned": time.time()})


@contextlib.contextmanager
def discarded_on_error(experiment: Experiment) -> Iterator[None]:
    """Remove the directory of a job that cannot be started."""
    try:
        yield
    except OrchestratorError:
        experiment.discard()
        raise
