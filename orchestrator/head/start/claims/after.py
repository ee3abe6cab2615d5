"""Wait for other experiments, as `--after EXP` asks for."""

from __future__ import annotations

import time

from orchestrator.common.errors import CheckFailed
from orchestrator.head.screen.output import say
from orchestrator.head.screen.progress import Progress
from orchestrator.head.start.request import Request
from orchestrator.records import experiments

LOOK_SECONDS = 2.0  # between two reads of a record


def wait_for_others(request: Request) -> None:
    """Return once the experiments of --after are done; refuse the launch if one ended otherwise."""
    for name in request.config.launch.after:
        if not is_done(request, name):
            say(f"it waits: not before {name} is over")
            with Progress(f"waiting for {name}"):
                while not is_done(request, name):
                    time.sleep(LOOK_SECONDS)


def is_done(request: Request, name: str) -> bool:
    experiment = experiments.find(request.where.experiments, name)
    if experiment is None:
        raise experiments.missing(request.where.experiments, name)
    record = experiment.read_record()
    if record.over and record.state != "done":
        fix = "leave out --after, or name a job that is done"
        raise CheckFailed(f"{name} has {record.state}; nothing was started", fix)
    return record.over
