"""Measures how much communication hides behind computation, over all ranks, and which rank is slow.

`orchestrator profile DIR` does so for the traces of any torch.profiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.traces.rank import Intervals, Rank, length, merge


@dataclass(frozen=True)
class Overlap:
    """All ranks. A collective lasts from the arrival of a rank to its end, so it contains the wait
    for the last one to arrive, who is the slow one and waits least."""

    ranks: dict[int, Rank]
    waited_ms: dict[int, float]  # per step: in collectives that took a faster rank less time
    straggler: int | None  # the rank that waits least, if the others wait noticeably longer
    lag_ms: float  # per step: how much longer, on average
    unmatched: tuple[str, ...] = ()  # collectives that ranks saw unequal numbers of: left out

    @property
    def communication(self) -> float:
        """Communication as a part of the time, over all ranks."""
        return self._sum("communication_ms") / (self._sum("window_ms") or 1)

    @property
    def hidden(self) -> float:
        """Hidden communication as a part of all communication, over all ranks."""
        return self._sum("overlapped_ms") / (self._sum("communication_ms") or 1)

    def _sum(self, name: str) -> float:
        total: float = sum(getattr(rank, name) for rank in self.ranks.values())
        return total


NOTICEABLE = 0.02  # of a step; less is noise


def compare(ranks: Mapping[int, Rank]) -> Overlap:
    waits: dict[int, Intervals] = {number: [] for number in ranks}
    unmatched = []
    for kind in sorted({kind for rank in ranks.values() for kind in rank.collectives}):
        spans = {n: rank.collectives[kind] for n, rank in ranks.items() if kind in rank.collectives}
        if len({len(events) for events in spans.values()}) > 1:
            unmatched.append(kind)
            continue
        for same in zip(*spans.values(), strict=True):
            fastest = min(end - start for start, end in same)
            for number, (start, end) in zip(spans, same, strict=True):
                waits[number].append((start, end - fastest))
    # DDP has several under way at a time: what they wait together is not to be counted twice.
    waited = {n: length(merge(events)) / ranks[n].steps for n, events in waits.items()}
    straggler, lag = None, 0.0
    if len(ranks) > 1:
        least = min(waited, key=lambda number: waited[number])
        others = [time for number, time in waited.items() if number != least]
        lag = sum(others) / len(others) - waited[least]
        step = ranks[least].window_ms / ranks[least].steps
        # Ranks that wait for each other in turn (two on one busy machine: 19.8 and 12.9 ms of a
        # step of 136) are equally slow.
        straggler = least if lag > max(NOTICEABLE * step, waited[least]) else None
    return Overlap(dict(sorted(ranks.items())), waited, straggler, lag, tuple(unmatched))


# -- in words -------------------------------------------------------------------------------------

# Of each part of a step: its heading, and its field in a Rank.
COLUMNS = {
    "step": "window_ms",
    "computing": "compute_ms",
    "exposed comm": "exposed_ms",
    "data": "data_ms",
    "idle": "idle_ms",
}
MOST_LINES = 16


def to_text(overlap: Overlap, hosts: Mapping[int, str] | None = None) -> str:
    """Format a table in milliseconds per step, and what it means."""
    numbers = list(overlap.ranks)
    if len(numbers) > MOST_LINES:  # those that the others wait for
        numbers = sorted(sorted(numbers, key=lambda number: overlap.waited_ms[number])[:MOST_LINES])
    headings = (*COLUMNS, "waited")
    lines = ["rank  " + "  ".join(f"{name:>9}" for name in headings) + "  ms per step"]
    for number in numbers:
        rank = overlap.ranks[number]
        cells = [getattr(rank, name) / rank.steps for name in COLUMNS.values()]
        row = zip(headings, [*cells, overlap.waited_ms[number]], strict=True)
        line = f"{number:>4}  " + "  ".join(f"{cell:>{max(9, len(n))}.1f}" for n, cell in row)
        words = [(hosts or {}).get(number, ""), "slowest" * (number == overlap.straggler)]
        lines.append("  ".join([line, *filter(None, words)]))
    if len(overlap.ranks) > MOST_LINES:
        lines.append(f"      ... and {len(overlap.ranks) - MOST_LINES} more, which waited longer")
    return "\n".join([*lines, reading(overlap)])


def reading(overlap: Overlap) -> str:
    """Return one sentence: how much communication there is, and whether a rank is slow."""
    if not overlap.communication:
        return "no communication was seen"
    sentence = (
        f"communication is {overlap.communication:.0%} of the time"
        f" and {overlap.hidden:.0%} of it is hidden"
    )
    if overlap.straggler is not None:
        sentence += (
            f"; rank {overlap.straggler} is slowest:"
            f" others wait {overlap.lag_ms:.3g} ms per step for it"
        )
    elif len(overlap.ranks) > 1:
        sentence += "; no rank is slower than the others"
    if overlap.unmatched:
        sentence += f" (not compared: {', '.join(overlap.unmatched)})"
    return sentence


def as_data(overlap: Overlap) -> dict[str, Any]:
    """Return the result for JSON."""
    ranks = {}
    for number, rank in overlap.ranks.items():
        data = asdict(rank)
        del data["collectives"]
        ranks[str(number)] = {**data, "waited_ms_per_step": overlap.waited_ms[number]}
    return {
        "communication": overlap.communication,
        "hidden": overlap.hidden,
        "straggler": overlap.straggler,
        "lag_ms_per_step": overlap.lag_ms,
        "not_compared": list(overlap.unmatched),
        "reading": reading(overlap),
        "ranks": ranks,
    }
