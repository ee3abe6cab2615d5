"""Writes down how an attempt ended, and what follows: another attempt, or the end of the job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from orchestrator.head.start import policy
from orchestrator.head.start.policy import Decision
from orchestrator.records.experiment import RESIZED, Attempt, Experiment, JobRecord
from orchestrator.records.metrics import trainers

MORE_NODES = "more nodes were free"  # said by a head that has taken over in between


def judged(
    experiment: Experiment, record: JobRecord, *, stopped: bool = False, resized: str = ""
) -> JobRecord:
    """Return the record of an attempt that has ended as that of a job that goes on, or is over.

    `resized`: why it was ended to go on with more nodes.
    """
    allowed = record.launch.max_restarts
    if not allowed:
        return record
    attempts = [*record.attempts, ended(experiment, record)]
    decision = policy.decide(attempts, allowed)
    if record.state == RESIZED:
        decision = Decision(restart=True, why=resized or MORE_NODES, verdict=None)
    if stopped:
        decision = Decision(restart=False, why="the user stopped it", verdict=record.verdict)
    attempts[-1] = replace(attempts[-1], restarted=decision.restart, why=decision.why)
    if not decision.restart:
        return replace(record, attempts=attempts, verdict=decision.verdict)
    return replace(
        record, attempts=attempts, state="restarting", exit_code=None, ended=None, verdict=None
    )


def ended(experiment: Experiment, record: JobRecord) -> Attempt:
    """Describe the attempt that this record says has ended."""
    codes = (rank.get("code") for node in record.nodes for rank in node.ranks.values())
    earlier = record.attempts
    return Attempt(
        number=len(earlier) + 1,
        job=record.job,
        started=earlier[-1].ended if earlier else record.started,
        ended=record.ended or 0.0,
        state=record.state,
        exit_code=record.exit_code,
        verdict=record.verdict,
        nodes=[node.name for node in record.nodes],
        codes=sorted({code for code in codes if code is not None}),
        step=step_reached(experiment.path / "outputs"),
        ran=seconds_of_ranks(record),
        clock=next((node.clock for node in record.nodes), 0.0),
    )


def seconds_of_ranks(record: JobRecord) -> float:
    """Return for how long ranks ran in an attempt that has ended; 0 if none has begun.

    An attempt begins with the end of the one before: for minutes it may wait for a node.
    """
    began = [node.times["ranks"] for node in record.nodes if "ranks" in node.times]
    return max(0.0, (record.ended or 0.0) - max(began)) if began else 0.0


def step_reached(outputs: Path) -> int | None:
    """Return the last step of which a metrics file of the engine tells, if there is one."""
    every = trainers.measured(outputs).values()
    steps = [trainers.last(path).step for files in every for path in files.values()]
    return max((step for step in steps if step is not None), default=None)
