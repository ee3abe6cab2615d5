"""Chooses which experiments go, and says why the others stay. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.head.prune.scan import OVER, ScannedExperiment


@dataclass(frozen=True)
class Rules:
    """The user's choice; older_than is in seconds."""

    keep: int
    older_than: float = 0.0
    keep_failed: bool = False


def choose(
    entries: Sequence[ScannedExperiment], now: float, rules: Rules
) -> list[tuple[ScannedExperiment, str | None]]:
    """Return every entry, the newest first, with the reason to keep it; None: it is removed.

    The newest `keep` are counted over all experiments, whatever became of them.
    """
    ours = [entry for entry in entries if entry.record is not None]
    ours.sort(key=lambda entry: (entry.when, entry.name), reverse=True)
    decided = [(entry, reason(entry, position, now, rules)) for position, entry in enumerate(ours)]
    return [*decided, *((entry, entry.foreign) for entry in entries if entry.record is None)]


def reason(entry: ScannedExperiment, position: int, now: float, rules: Rules) -> str | None:
    assert entry.record is not None
    if position < rules.keep:
        return "it is the newest" if rules.keep == 1 else f"among the newest {rules.keep}"
    if now - entry.when < rules.older_than:
        return "it is not old enough"
    if entry.pinned:
        return "pinned"
    if entry.busy:
        return entry.busy
    state = entry.record.state
    if rules.keep_failed and state not in ("done", "stopped"):
        return state if state in OVER else "how it ended is not known: orchestrator attach"
    return None
