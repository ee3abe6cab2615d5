"""`orchestrator try`: run a program on what is free, and print one number of it as JSON.

It is a launch that waits in the queue for one node, with a time limit; for a loop that changes a
file, tries it, and keeps what is better.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.common.errors import nearest
from orchestrator.head.follow.streams.node_logs import log_files
from orchestrator.head.status.comparison import first_files, read_curves
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.metrics.names import better
from orchestrator.records.metrics.step_lines import GAP

DEFAULTS = {"name": "try", "nnodes": 1, "claim": "all", "queue": True, "sync": "always"}
NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf)"
LONGEST_LINE = 1 << 16
Readings = list[tuple[int, float]]  # a step, and the value there
TIME_LIMIT = "(--time-limit)"  # in the reason of such an end


def result(experiment: Experiment, record: JobRecord, metric: str) -> dict[str, Any]:
    """Return what came of a job, and of one of its metrics."""
    verdict, names = record.verdict, list[str]()
    steps, pairs = readings(experiment, record, metric, names)
    values = [value for _, value in pairs]
    known = [value for value in values if math.isfinite(value)]
    best = {"least": min, "most": max}.get(better(metric))
    last = values[-1] if values and math.isfinite(values[-1]) else None
    in_time, problem = verdict is None or TIME_LIMIT not in verdict.message, ""
    if not values:
        problem = f"nothing measured or printed {metric}{nearest(metric, names)}"
    elif last is None:
        problem = f"the last {metric} is {values[-1]}"
    elif verdict is not None and in_time:
        problem = f"{verdict.title}: {verdict.message}" if verdict.message else verdict.title
    return {
        "metric": metric,
        "value": last,
        "best": best(known) if best and known else None,
        "steps": steps,
        "seconds": round((record.ended or record.started) - record.started, 1),
        "state": record.state,
        "time_limit": not in_time,
        "problem": problem,
        "experiment": experiment.name,
    }


def readings(
    experiment: Experiment, record: JobRecord, metric: str, names: list[str]
) -> tuple[int | None, Readings]:
    """Return the last step, and the values of a metric so far, each with its step.

    They are those of a Trainer, or else those that the program prints, which are counted. What a
    Trainer has is noted in `names`.
    """
    outputs = experiment.path / "outputs"
    steps: int | None = None
    for _, curves in sorted(read_curves(outputs, first_files(outputs)).items(), reverse=True):
        names += curves
        steps = steps or max((curve.steps[-1] for curve in curves.values()), default=None)
        if metric in curves:
            return steps, list(zip(curves[metric].steps, curves[metric].means, strict=True))
    logs = log_files(experiment, record.nodes)
    values = (value for log in logs for value in printed(log.text, metric))
    return steps, list(enumerate(values, 1))


def printed(log: Path, metric: str) -> Iterator[float]:
    """Yield the values that lines of a log give a metric: val_bpb: 0.98, val_bpb=0.98."""
    name = re.escape(metric)
    wanted = re.compile(rf"(?<![\w./-]){name}[\"']?{GAP}[:=]?{GAP}{NUMBER}(?![\w.])", re.I)
    with contextlib.suppress(FileNotFoundError), log.open(errors="replace") as lines:
        for line in lines:
            for match in wanted.finditer(line[:LONGEST_LINE]):
                yield float(match[1])
