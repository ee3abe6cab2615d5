"""Divides a job's wall clock into training and the kinds of lost time.

The parts always add up to the wall clock. The engine reports the times of each attempt
(engine/observe/metrics.py). For another script, only start and end are known, and the rest is
`unknown`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.protocol.message import Few, NodeTime, Nonsense, decode_value
from orchestrator.records.experiment import JobRecord
from orchestrator.records.metrics.lines import GrowingFile
from orchestrator.records.outcome import JobVerdict

# Each name in job.json, with its words for the user.
PARTS = {
    "training": "training",
    "data": "data",
    "checkpoints": "checkpoints",
    "replayed": "steps repeated",
    "load": "load",
    "start": "start",
    "detection": "lost to detection",
    "stop": "stop",
    "unknown": "unknown",
}
ACCOUNT = Path("outputs", "time_spent.jsonl")


@dataclass(frozen=True)
class Span:
    """The times of one attempt by the head's clock."""

    number: int
    started: float
    ended: float
    # When the cause of its failure happened.
    failed: float | None = None
    # When its ranks started, if known.
    ranks: float | None = None
    # The clock of rank 0's node minus the head's clock, in seconds.
    clock: float = 0.0
    # True if it has not ended. `ended` is then the present time.
    goes_on: bool = False


@dataclass(frozen=True)
class Account:
    """The engine's last report of an attempt's times."""

    began: NodeTime
    # When training began, after the load.
    trains: NodeTime | None
    # The step that it resumed from.
    first: int
    time: NodeTime
    step: int
    data: float
    checkpoints: float
    attempt: Few = 0


def divide_time(spans: Sequence[Span], accounts: Mapping[int, Account]) -> dict[str, float]:
    """Return seconds by part. Time between two attempts counts as the start of the second one."""
    parts = dict.fromkeys(PARTS, 0.0)
    reached, ended = 0, math.inf
    for span in spans:
        account = accounts.get(span.number)
        if account is None:
            lengths = cuts(span, span.ranks, span.failed or span.ended)
            found = dict(zip(("start", "unknown", "stop"), lengths, strict=True))
        else:
            found = _of_engine(span, account, reached)
            reached = max(reached, account.step)
        found["start"] += max(0.0, span.started - ended)
        for name, seconds in found.items():
            parts[name] += seconds
        ended = span.ended
    return parts


def cuts(span: Span, *moments: float | None) -> list[float]:
    """Return the lengths between successive moments of a span.

    A moment that is out of order is clamped. None stands for the moment before it.
    """
    lengths, at = [], span.started
    for moment in (*moments, span.ended):
        upto = at if moment is None else min(max(moment, at), span.ended)
        lengths.append(upto - at)
        at = upto
    return lengths


def _of_engine(span: Span, spoken: Account, reached: int) -> dict[str, float]:
    trains = spoken.time if spoken.trains is None else spoken.trains
    start, load, steps, detection, stop = cuts(span, spoken.began, trains, spoken.time, span.failed)
    data = max(0.0, min(spoken.data, steps))
    checkpoints = max(0.0, min(spoken.checkpoints, steps - data))
    training = steps - data - checkpoints
    # The steps that an earlier attempt had done already.
    again = min(reached, spoken.step) - spoken.first
    replayed = training * again / (spoken.step - spoken.first) if again > 0 else 0.0
    return {
        "start": start,
        "load": load,
        "data": data,
        "checkpoints": checkpoints,
        "training": training - replayed,
        "replayed": replayed,
        "detection": detection,
        # The time since the last report of a running attempt cannot be classified yet.
        "unknown" if span.goes_on else "stop": stop,
    }


# -- from files of the experiment -----------------------------------------------------------------


def spans_of(record: JobRecord, now: float) -> list[Span]:
    spans = [
        Span(
            attempt.number,
            attempt.started,
            attempt.ended,
            failed_at(attempt.verdict),
            ranks=None if attempt.ran is None else attempt.ended - attempt.ran,
            clock=attempt.clock,
        )
        for attempt in record.attempts
    ]
    ranks = [node.times["ranks"] for node in record.nodes if "ranks" in node.times]
    if record.state in ("starting", "restarting"):
        # Without running ranks, all time so far counts as start.
        ranks = [now]
    ended = now if record.ended is None else record.ended
    began = max([record.started, *(span.ended for span in spans)])
    if not record.attempts or record.attempts[-1].restarted or not record.over:
        number = len(record.attempts) + 1
        # A stop is requested by the user: it has no detection time.
        failed = None if record.state == "stopped" else failed_at(record.verdict)
        clock = next((node.clock for node in record.nodes), 0.0)
        goes_on = record.ended is None
        spans.append(Span(number, began, ended, failed, max(ranks, default=None), clock, goes_on))
    return spans


def head_time(record: JobRecord, moment: float, node: int | None = None) -> float:
    """Return by the head's clock what a node has written down by its own.

    Without `node` it is a time of rank 0, by the clock that its node had in that attempt. Of all
    nodes the record has the latest clock alone.
    """
    if node is not None:
        return moment - (record.nodes[node].clock if node < len(record.nodes) else 0.0)
    spans = reversed(spans_of(record, moment))
    return moment - next((span.clock for span in spans if moment - span.clock >= span.started), 0.0)


def failed_at(verdict: JobVerdict | None) -> float | None:
    return (verdict.time or None) if verdict else None


def accounts_in(path: Path, spans: Sequence[Span] = ()) -> dict[int, Account]:
    """Return the engine's last report of each attempt, by the head's clock if the spans have it.

    Invalid lines of the file are skipped.
    """
    clocks = {str(span.number): span.clock for span in spans}
    lines = GrowingFile(path, having=b'"attempt":').lines()
    accounts = {}
    for number, line in {str(line.get("attempt")): line for line in lines}.items():
        with contextlib.suppress(Nonsense):
            account = decode_value(Account, line, newer=True, ahead=clocks.get(number, 0.0))
            accounts[account.attempt] = account
    return accounts


def goodput_seconds(record: JobRecord, experiment: Path, now: float) -> dict[str, float]:
    """Return the seconds of each part, up to now or to the end of the job."""
    spans = spans_of(record, now)
    parts = divide_time(spans, accounts_in(experiment / ACCOUNT, spans))
    return {name: round(seconds, 3) for name, seconds in parts.items()}


def shares_in_words(parts: Mapping[str, float]) -> str:
    """Return the shares, the largest first, as text: 81% training, 9% start, 6% load.

    The text is empty if the job's program reported no times.
    """
    whole = sum(parts.values())
    if not (parts.get("training") or parts.get("load")):
        return ""
    known = sorted(((value, name) for name, value in parts.items() if value), reverse=True)
    shown = [
        f"{value / whole:.0%} {PARTS.get(name, name)}"
        for value, name in known
        if value >= 0.005 * whole
    ]
    return ", ".join(shown)
