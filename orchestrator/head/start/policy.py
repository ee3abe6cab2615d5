"""Decides whether a job that has failed is started again. Pure: attempts go in, a decision out.

What may pass by itself (a node lost, a rank killed, a hang, a broken link) is tried again as often
as the user allows. What the program did itself is tried again once: the same failure at the same
step is the program's own. Attempts that get nowhere end after three, with their first cause.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.common.errors import EXIT_NO_RESTART
from orchestrator.head.start import growth
from orchestrator.records.experiment import Attempt

# Kinds of failures (head/follow/failure_kinds.py) that another start may not meet again.
PASSING = {
    "lost": "the node was lost",
    "hang": "it hung",
    "link": "a connection between ranks broke",
    "communication": "the ranks lost each other",
    "signal": "a rank was killed",
    "corruption": "bits had changed by themselves",
    "out_of_memory": "the host had no memory left",
    "shared_memory": "/dev/shm was full",
    "supervisor": "a supervisor was killed",
    "torchrun": "torchrun failed",
    "start": "it could not be started",
}
# Which node's snapshot of the code a path is in; two nodes may report one failure.
SNAPSHOT = re.compile(r"/\S*?/code/snapshots/[^/\s]+/")
MOST_WORDS = 150  # of the reason why an attempt could not be started
MOST_IDLE = 3  # attempts in a row without progress
ALIVE_SECONDS = 120.0  # an attempt whose steps are unknown has got somewhere when it ran so long,
YOUNG_SECONDS = 900.0  # but not if the one before met the same at the same age, before this one:
SAME_AGE = 0.1  # by so much of it the two may differ; it takes as long to load each time


@dataclass(frozen=True)
class Decision:
    """Whether the job is started again, why or why not, and what is to be called the cause."""

    restart: bool
    why: str
    verdict: dict[str, Any] | None


def decide(attempts: Sequence[Attempt], allowed: int) -> Decision:
    """Decide what follows the last of these attempts, where so many restarts are allowed."""
    last = attempts[-1]

    def end(why: str, verdict: dict[str, Any] | None = last.verdict) -> Decision:
        return Decision(False, why, verdict)

    if last.state not in ("failed", "lost"):
        return end(f"it is {last.state}")
    if not allowed:
        return end("no restarts are allowed")
    if EXIT_NO_RESTART in last.codes:
        return end(f"a rank ended with {EXIT_NO_RESTART}: the program wants no restart")
    counted = growth.failures(attempts)
    if last not in counted:
        return Decision(True, f"{because(last)}, as soon as more nodes had joined", None)
    if not is_passing(last) and any(is_same(last, other) for other in counted[:-1]):
        return end("the program failed in the same way before")
    idle = without_progress(counted)
    if len(idle) >= MOST_IDLE:
        first = idle[0]
        others = [one for one in idle if because(one) != because(first)]
        parts = [
            f"{len(idle)} attempts in a row got nowhere",
            f"the cause is that of attempt {first.number}",
            *(f"attempt {other.number}: {because(other)}" for other in others),
        ]
        return end("; ".join(parts), first.verdict)
    if len(counted) > allowed:
        return end(f"all {allowed} restarts are used up" if allowed > 1 else "its restart is used")
    return Decision(True, because(last), None)


def attempts_allowed(attempts: Sequence[Attempt], restarts: int) -> int:
    """Return how many attempts there may be: one, the restarts, and those that cost none."""
    return 1 + restarts + len(attempts) - len(growth.failures(attempts))


def kind_of(attempt: Attempt) -> str:
    return str((attempt.verdict or {}).get("kind", ""))


def is_passing(attempt: Attempt) -> bool:
    """Tell whether the failure is of a kind that another start may not meet again."""
    return attempt.state == "lost" or kind_of(attempt) in PASSING


def because(attempt: Attempt) -> str:
    """Say in a few words what happened, for the line between two attempts."""
    verdict = attempt.verdict or {}
    what = PASSING.get(kind_of(attempt), "a rank failed")
    node, rank = verdict.get("node"), verdict.get("rank")
    if kind_of(attempt) == "lost" and node is not None:
        return f"node {node} lost"
    if kind_of(attempt) == "start":
        why = str(verdict.get("message", "")).partition("\n")[0]
        return f"{what}: {why[:MOST_WORDS]}" if why else what
    if rank is not None:
        return f"{what}: rank {rank} on node {node}"
    return what if node is None else f"{what}: node {node}"


def is_same(one: Attempt, other: Attempt) -> bool:
    """Tell whether two attempts failed alike, at the same step as far as steps are known."""

    def told(attempt: Attempt) -> tuple[Any, ...]:
        verdict = attempt.verdict or {}
        message = str(verdict.get("message", "")).partition("\n")[0]
        where, message = (SNAPSHOT.sub("", str(text)) for text in (verdict.get("where"), message))
        return verdict.get("kind"), where, message, attempt.step

    return told(one) == told(other)


def without_progress(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts at the end, one after the other, that got no further than before."""
    idle: list[Attempt] = []
    for number, attempt in enumerate(attempts):
        before = max((earlier.step or 0 for earlier in attempts[:number]), default=0)
        moved = attempt.alive >= ALIVE_SECONDS if attempt.step is None else attempt.step > before
        if moved and number and ended_alike(attempts[number - 1], attempt):
            moved, idle = False, idle or [attempts[number - 1]]
        idle = [] if moved else [*idle, attempt]
    return idle


def ended_alike(before: Attempt, attempt: Attempt) -> bool:
    """Tell whether two attempts, of whose steps nobody knows, met the same at the same young age.

    A program that loads for minutes and then always fails has got nowhere, however long it ran.
    """
    unknown = before.step is None and attempt.step is None
    ages = sorted((before.alive, attempt.alive))
    near = ages[1] < YOUNG_SECONDS and ages[1] - ages[0] <= SAME_AGE * ages[1]
    return unknown and near and is_same(before, attempt)
