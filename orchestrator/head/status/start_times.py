"""How long each step of a job's first start took, for the line of `status`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from orchestrator.common.errors import UsageError
from orchestrator.records import manifest
from orchestrator.records.experiment import Experiment, JobRecord

# A step -> the moment of the manifest's timeline at which it ends.
ENDS = {"connect": "reached", "code": "synced", "plan": "planned", "check": "checked"}


def start_times(record: JobRecord) -> dict[str, float]:
    """Return the seconds of each step; empty for later attempts, and where they are not known."""
    if record.attempt > 1 or not record.experiment:
        return {}
    try:
        timeline = manifest.read(Experiment(Path(record.experiment)))["timeline"]
        moments = [float(timeline[name]) for name in ("begin", *ENDS.values())]
    except (UsageError, LookupError, TypeError, ValueError):
        return {}
    ranks = [node.times.get("ranks", 0.0) for node in record.nodes]
    if all(ranks):
        moments.append(max(ranks, default=0.0))
    # The clocks of two machines may differ.
    seconds = [max(0.0, end - begin) for begin, end in pairwise(moments)]
    return dict(zip((*ENDS, "ranks"), seconds))  # noqa: B905  the ranks may not run yet


def in_words(seconds: dict[str, float]) -> str:
    return ", ".join(f"{step} {took:.2f} s" for step, took in seconds.items())
