"""A row of the list of jobs, as `orchestrator ls` and the dashboard show it. No node is asked."""

from __future__ import annotations

import re
import shlex
import time
from dataclasses import dataclass

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import in_one_line
from orchestrator.head.screen.progress import stall_notice
from orchestrator.records import goodput
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.metrics import progress

UNREADABLE = "damaged"
LONGEST_CAUSE = 300
# What a record raises that cannot be read, or makes no sense: that one's trouble, not the list's.
TROUBLE = (OSError, UsageError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError)


# Options of a launch that say where it was typed, and nothing of the job.
OF_THE_PLACE = re.compile(r"(?<!\S)--(nodes|ssh-config|experiments)[= ]('[^']*'|\S+) ?")


@dataclass(frozen=True)
class Row:
    """One job with its state and progress."""

    name: str
    state: str
    progress: progress.Progress = progress.Progress()
    nodes: int = 0
    ranks: int = 0
    attempt: int = 1
    started: float = 0.0
    ended: float | None = None
    # How long a running job has made no step, as text; empty if it makes steps.
    stalled: str = ""
    # The reason why the job failed, or why its record cannot be read.
    cause: str = ""
    # The fraction of the job's time that was spent on training.
    training: float | None = None
    # The user's own note, from --note.
    note: str = ""
    tags: tuple[str, ...] = ()
    # The program and its arguments, or the options of a launch of the built-in engine.
    command: str = ""


def command_of(record: JobRecord) -> str:
    """Return the program of a job with its arguments, or the options of the engine, in one line."""
    return in_one_line(
        shlex.join(record.program) or OF_THE_PLACE.sub("", shlex.join(record.command[1:]))
    )


def row_of(experiment: Experiment, record: JobRecord) -> Row:
    """Return the row of a job; TROUBLE is raised where it makes no sense."""
    known = record.goodput or goodput.goodput_seconds(
        record, experiment.path, record.ended or time.time()
    )
    whole = sum(known.values())
    training = known.get("training", 0.0) / whole if whole else 0.0
    verdict = record.verdict if record.state in ("failed", "lost") else None
    words = ": ".join(filter(None, (verdict.title, verdict.message))) if verdict else ""
    return Row(
        experiment.name,
        record.state,
        progress.read_progress(experiment.path, record)[0],
        nodes=len(record.nodes),
        ranks=sum(node.nproc for node in record.nodes),
        attempt=record.attempt,
        started=record.started,
        ended=record.ended if record.over else None,
        stalled=stall_notice(experiment.path) if record.state == "running" else "",
        cause=(words.splitlines() or [""])[0][:LONGEST_CAUSE],
        training=training if 0 < training <= 1 else None,
        note=in_one_line(record.launch.note or ""),
        tags=tuple(map(in_one_line, record.launch.tag)),
        command=command_of(record),
    )


def damaged_row(name: str, error: Exception) -> Row:
    """Return the row of an experiment that raised some TROUBLE."""
    known = getattr(error, "what", None) or getattr(error, "strerror", None)
    return Row(name, UNREADABLE, cause=known or f"unreadable ({type(error).__name__})")
