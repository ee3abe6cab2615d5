"""Describes what happened to a job: an end, a failure, a restart, a straggler. Pure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.common.text import duration, plural
from orchestrator.head.follow import verdict
from orchestrator.head.follow.restarts import Restarts
from orchestrator.head.screen import tracebacks as crash_dump
from orchestrator.head.screen.lines import clean
from orchestrator.records.experiment import JobRecord
from orchestrator.records.outcome import SlowRank, Verdict

MOST_TEXT_CHARACTERS = 1900  # a message of a chat program may have 2000
MOST_TRACE = 8000


@dataclass(frozen=True)
class Notice:
    """One thing that happened to a job."""

    event: str  # end, failure, restart, straggler
    experiment: str
    path: str
    job: str
    state: str
    attempt: int
    time: float
    head: str  # the machine of the head
    text: str  # in words; the first line is a title
    verdict: Verdict | None = None
    straggler: SlowRank | None = None


def of(event: str, record: JobRecord, text: str, when: float) -> Notice:
    name = Path(record.experiment).name
    return Notice(
        event=event,
        experiment=name,
        path=record.experiment,
        job=record.job,
        state=record.state,
        attempt=record.attempt,
        time=when,
        head=os.uname().nodename,
        text=shown(f"{name} {text}".splitlines()),
    )


def of_end(record: JobRecord, tree: str = "") -> Notice:
    """Describe a job that is over."""
    ended = record.ended or 0.0
    after = f"after {duration(ended - record.started)} on {plural(len(record.nodes), 'node')}"
    if record.state not in ("failed", "lost"):
        was = "is done" if record.state == "done" else f"was {record.state}"
        return of("end", record, f"{was} {after}: {record.experiment}", ended)
    how = "failed" if record.state == "failed" else "lost a node"
    return with_cause(of("failure", record, f"{how} {after}", ended), record.verdict, tree)


def of_restart(record: JobRecord, tree: str = "") -> Notice:
    """Describe an attempt that failed and is followed by another one."""
    last = record.attempts[-1]
    at = "" if last.step is None else f" at step {last.step}"
    took = duration(last.ended - last.started)
    most = Restarts(record).most_attempts
    text = (
        f"is started again: attempt {last.number} of at most {most} {last.state} after {took}{at}"
    )
    return with_cause(of("restart", record, text, last.ended), last.verdict, tree)


def of_straggler(record: JobRecord, slow: SlowRank, when: float) -> Notice:
    """Describe a rank that holds the others up, or a checkpoint that is missing."""
    text = f"is held up: {slow.text}" if slow.holds_up else slow.text
    notice = of("straggler", record, text, when)
    return replace(notice, straggler=slow)


def with_cause(notice: Notice, cause: Verdict | None, tree: str) -> Notice:
    """Add the verdict, with the paths that the user knows."""
    if cause is None:
        return notice
    cause = crash_dump.in_verdict(cause, tree)
    text = shown([*notice.text.splitlines(), *verdict.to_lines(cause)])
    cause = replace(cause, traceback=cause.traceback[-MOST_TRACE:])
    return replace(notice, text=text, verdict=cause)


def shown(lines: Sequence[str]) -> str:
    """Join lines that may quote a node: nothing in them moves a cursor or turns text around."""
    text = "\n".join(map(clean, lines))
    return text if len(text) <= MOST_TEXT_CHARACTERS else f"{text[:MOST_TEXT_CHARACTERS]} ..."
