"""How long: "30s", "2m", "5 epochs", "1000 steps"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from orchestrator.errors import UsageError, nearest

SECONDS = {"s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60}
SECONDS |= {"h": 3600, "hour": 3600, "d": 86400, "day": 86400}
COUNTS = {"e": "epochs", "epoch": "epochs", "st": "steps", "step": "steps"}


@dataclass(frozen=True)
class Duration:
    amount: float
    unit: str  # seconds (since train() began), steps or epochs (since the very beginning)

    def times(self, seconds: float, steps: int, epochs: int) -> int:
        """How often it has passed."""
        passed = {"seconds": seconds, "steps": steps, "epochs": epochs}[self.unit]
        return int(passed / self.amount)

    def over(self, seconds: float, steps: int, epochs: int) -> bool:
        return self.times(seconds, steps, epochs) >= 1

    def __str__(self) -> str:
        return f"{self.amount:g} {self.unit}"


def parse(name: str, text: str | None) -> Duration | None:
    if text is None:
        return None
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]+)\s*", str(text), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise UsageError(
            f"{name} is {text!r}; it must be a number above 0 with a unit",
            'such as "30s", "2m", "1.5h", "1000 steps" or "3 epochs"',
        )
    word = match[2].lower()
    unit = word if word in SECONDS | COUNTS else word.removesuffix("s")
    if unit in SECONDS:
        return Duration(float(match[1]) * SECONDS[unit], "seconds")
    if unit in COUNTS:
        return Duration(float(match[1]), COUNTS[unit])
    known = ["seconds", "minutes", "hours", "days", "epochs", "steps"]
    raise UsageError(f"{name} is {text!r}: {match[2]!r} is no unit{nearest(word, known)}")
