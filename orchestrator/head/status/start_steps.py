"""The steps of a job's start, in seconds, from its manifest and its record."""

from __future__ import annotations

import contextlib
from pathlib import Path

from orchestrator.common.errors import UsageError
from orchestrator.records import manifest
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.manifest import StartTimes


def of(record: JobRecord) -> dict[str, float]:
    """Return the seconds of each step of the first start; nothing where they are not known here.

    The manifest has the times of the first attempt alone.
    """
    if not record.experiment or record.attempt > 1:
        return {}
    with contextlib.suppress(UsageError):
        return steps(manifest.start_times(Experiment(Path(record.experiment))), record)
    return {}


def steps(times: StartTimes, record: JobRecord) -> dict[str, float]:
    """Subtract each moment from the one before it; a step whose end is missing is in the next."""
    if not times.begin or not times.synced or len(times.nodes) != len(record.nodes):
        return {}
    ranks = [node.times.get("ranks", 0.0) for node in record.nodes]
    outputs = [node.times["output"] for node in record.nodes if "output" in node.times]
    all_run = bool(ranks) and all(ranks)
    before_its_turn = {
        "command": min((node.get("begin", 0.0) for node in times.nodes), default=0.0),
        "connect": times.reached,
        "code": times.synced,
    }
    since_its_turn = {
        "plan": times.planned,
        "check": times.checked,
        "ranks": max(ranks) if all_run else 0.0,
        "output": min(outputs) if outputs and all_run else 0.0,
    }
    # How long a launch waited for its turn is not known apart: its steps count from there.
    waited = record.launch.queue
    before = times.synced if waited else times.begin
    moments = since_its_turn if waited else {**before_its_turn, **since_its_turn}
    seconds: dict[str, float] = {}
    for name, moment in moments.items():
        if moment:
            # Clocks of two machines may differ, and a rank may print before another one starts.
            seconds[name] = max(0.0, moment - before)
            before = max(before, moment)
    return seconds


def in_words(known: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in known.items())
