"""When a job that runs on fewer nodes than it may have takes another, and which it lets rest. Pure.

A change that was planned is no failure: it costs no restart. A node with which the job then gets
nowhere is given up again, rests, and is tried three times at most.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from orchestrator.common.text import duration
from orchestrator.records.experiment import RESIZED, Attempt

MOMENTS = 120.0  # seconds in which an attempt whose steps are unknown shows that it can run
REST_SECONDS = 600.0  # before a node is tried again; doubled each time
MOST_STRIKES = 3
LONGEST_PAUSE = 10  # between two looks that found nothing, in times of the first one


def pause(every: float, looks: int) -> float:
    """Return the seconds to the next look, after so many that have found nothing new."""
    return every * min(LONGEST_PAUSE, 2.0 ** max(0, looks - 1))


def failures(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts whose ends count against --max-restarts."""
    vain = [attempt.number for attempt, _ in in_vain(attempts)]
    return [one for one in attempts if one.state != RESIZED and one.number not in vain]


def in_vain(attempts: Sequence[Attempt]) -> Iterator[tuple[Attempt, list[str]]]:
    """Yield the attempts that failed as soon as further nodes had joined, and these nodes."""
    for before, attempt in itertools.pairwise(attempts):
        joined = [name for name in attempt.nodes if name not in before.nodes]
        if before.state == RESIZED and joined and attempt.state in ("failed", "lost"):
            if attempt.step is None or before.step is None:
                moved = attempt.alive >= MOMENTS
            else:
                moved = attempt.step > before.step
            if not moved:
                yield attempt, joined


def refusal(attempts: Sequence[Attempt], name: str, now: float) -> str:
    """Say why a node is not to join yet, in words after its name; nothing, if it may."""
    strikes = [attempt.ended for attempt, joined in in_vain(attempts) if name in joined]
    if not strikes:
        return ""
    if len(strikes) >= MOST_STRIKES:
        return f"has joined {len(strikes)} times, and the job got nowhere with it"
    left = strikes[-1] + REST_SECONDS * 2 ** (len(strikes) - 1) - now
    if left <= 0:
        return ""
    return f"had joined, and the job got nowhere with it: it rests for {duration(left)}"
