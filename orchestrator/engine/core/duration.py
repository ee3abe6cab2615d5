"""Read and count durations of a training: "30s", "2m", "5 epochs", "1000 steps"."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.common import text
from orchestrator.common.errors import UsageError, nearest

COUNTS = {"e": "epochs", "epoch": "epochs", "st": "steps", "step": "steps"}


@dataclass(frozen=True)
class Duration:
    amount: float
    unit: str  # seconds (since train() began), steps or epochs (since the very beginning)

    def times(self, seconds: float, steps: int, epochs: int) -> int:
        """Return how often it has passed."""
        passed = {"seconds": seconds, "steps": steps, "epochs": epochs}[self.unit]
        return int(passed / self.amount)

    def over(self, seconds: float, steps: int, epochs: int) -> bool:
        return self.times(seconds, steps, epochs) >= 1

    def __str__(self) -> str:
        return f"{self.amount:g} {self.unit}"


def parse(name: str, period: str | None) -> Duration | None:
    if period is None:
        return None
    parts = text.number_and_unit(str(period))
    if parts is None or not parts[0] or not parts[1]:
        raise UsageError(
            f"{name} is {period!r}; it must be a number above 0 with a unit",
            'such as "30s", "2m", "1.5h", "1000 steps" or "3 epochs"',
        )
    amount, unit = parts
    if letter := text.time_unit(unit):
        return Duration(amount * text.SECONDS[letter], "seconds")
    plain = unit.lower().removesuffix("s")
    if count := COUNTS.get(unit.lower()) or COUNTS.get(plain):
        return Duration(amount, count)
    known = ["seconds", "minutes", "hours", "days", "epochs", "steps"]
    raise UsageError(f"{name} is {period!r}: {unit!r} is no unit{nearest(unit.lower(), known)}")
