"""Reads steps and losses from the lines that a training program prints, without side effects.

A line with both is read: `step 12/100 loss 0.3`. The step may also be in a progress bar or in a
line above: transformers prints `{'loss': 0.3}` below its bar. A count of batches is combined with
the epoch in the line: `Epoch [2/5], Step [100/600], Loss: 2.2`. A step below the last one is
dropped: no curve is better than a wrong one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from orchestrator.records.metrics.lines import number

# A program's output is not trusted: none of these may scan a long line repeatedly.
NUMBER = r"([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?|nan|inf)\b"
GAP = r"\s{0,16}"
WHOLE = r"(\d[\d,]{0,18})(?!\w|\.\d)"
COUNT = r"(\d{1,19})"
OF_ALL = rf"(?:{GAP}(?:/|of){GAP}{WHOLE})?"
# Matches the separator between a name and its value.
IS = rf"['\"]?{GAP}(?:[:=#|\[(]{GAP}){{0,2}}['\"]?"
COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ANSWER_FILE = re.compile(r"loss|step|iter|update|batch|epoch|%\||\[", re.IGNORECASE)
LONGEST_CHARACTERS = 2000
# The last line of transformers has this word, and the mean loss of the run.
OF_THE_RUN = "train_runtime"

LOSS = re.compile(
    rf"(?<!\w)(?:(\w+)[ _/.-])??loss([/_.][\w/.]*)?(?:[ _](?:train|avg|mean|total|value))?{IS}"
    rf"(?:tensor\()?{NUMBER}",
    re.IGNORECASE,
)
OF_EVALUATION = re.compile(r"(?:^|[_/. ])(?:val(?!ue)|eval|test|dev)", re.IGNORECASE)
OF_TRAINING = re.compile(r"train|total|running", re.IGNORECASE)
# Words of values that are not the loss of this step, or only a part of it.
NO_LOSS = re.compile(
    r"(?:^|[_/. ])(?:best|min|max|lowest|last|prev|previous|target|scale|weight|coef\w*|fn|func"
    r"|value|value_function|vf|critic|entropy|aux\w*|kl|reg\w*|lb|balanc\w*|z)(?:$|[_/. ])",
    re.IGNORECASE,
)
# Words such as `best` stand within this distance before `val loss`.
WORD_BEFORE_CHARACTERS = 12
# Matches an evaluation, which counts own batches: `Test: [11/13] Loss 2.1`, `[Eval batch=5/50]`.
EVALUATION = re.compile(
    rf"(?:^|[|\[(\])>:-]|\b(?:INFO|DEBUG)\b){GAP}"
    r"(?:test|val|valid|validation|eval|evaluation|dev|cv)\b"
    rf"(?![ _/.-]?loss{IS}{NUMBER})",
    re.IGNORECASE,
)
# The most reliable pattern is first. `warmup_steps` and `step time` do not match.
NAMED = [
    re.compile(
        rf"(?<![\w./-])(?:(?:global|train(?:ing)?|current|opt(?:imi[sz]er)?|num)[ _/])?"
        rf"{words}{IS}{WHOLE}{OF_ALL}",
        re.IGNORECASE,
    )
    for words in (
        "step(?:/max_steps)?", r"iter(?:ation)?(?:\(train\))?", "updates?", "batch"
    )
]  # fmt: skip
# Matches an epoch and the count of its batches:
# `Epoch: [0][ 10/100]`, `[0/25][50/1583]`, `Train: 0 [5/9`.
OF_EPOCH = re.compile(
    rf"(?:(?:epoch|train)(?:\(\w{{1,16}}\))?[\s:=\[]{{0,6}}|\[{GAP}){COUNT}(?:/{COUNT})?"
    rf"[\s,:|\]\[]{{0,8}}(?:(?:iter(?:ation)?|batch|update)[\s:=\[]{{0,4}}|(?:step {GAP})?\[{GAP}"
    rf"|(?<=\[)){COUNT}{GAP}/{GAP}{COUNT}",
    re.IGNORECASE,
)
EPOCH = re.compile(rf"(?<!\w)epoch[\s:=\[(]{{0,6}}{COUNT}(?:/{COUNT})?(?![\d.])", re.IGNORECASE)
# Matches a progress bar of tqdm.
BAR = re.compile(rf"(?<!\d)\d{{1,3}}%\|[^|]*\|{GAP}{COUNT}/{COUNT} \[")
MORE = {
    "lr": re.compile(rf"(?<!\w)(?:lr|learning_rate){IS}{NUMBER}", re.IGNORECASE),
    "grad_norm": re.compile(rf"(?<!\w)grad[ _]?norm{IS}{NUMBER}", re.IGNORECASE),
    "tokens_per_s": re.compile(rf"(?<!\w)(?:tps|tok(?:ens)?/s(?:ec)?){IS}{WHOLE}", re.IGNORECASE),
}


# The step of a training over all epochs, and the number of steps if known.
Place = tuple[int, int | None]


@dataclass
class StepReader:
    """Reads the lines of one rank in order."""

    # The position that was read last.
    place: Place | None = None
    # True if epochs are counted from 0.
    from_zero: bool = False
    # The total of the last progress bar, and its last count.
    total: int = 0
    done: int = 0
    # How often that bar started again.
    rounds: int = 0

    def values(self, line: str) -> dict[str, Any]:
        """Return the step, the losses and further values of a line, or {} if it has no loss."""
        if not ANSWER_FILE.search(line):
            return {}
        line = COLORS.sub("", line[:LONGEST_CHARACTERS])
        if EVALUATION.search(line) or OF_THE_RUN in line:
            return {}
        losses = losses_in(line)
        place = self.find(line, has_loss=bool(losses))
        if place is not None and self.place is not None and place[0] < self.place[0]:
            return {}
        self.place = place or self.place
        if self.place is None or not losses:
            return {}
        values: dict[str, Any] = {"step": self.place[0], **losses}
        if self.place[1] is not None:
            values["steps"] = self.place[1]
        for name, pattern in MORE.items():
            if match := pattern.search(line):
                values[name] = number(float(match[1].replace(",", "")))
        return values

    def find(self, line: str, *, has_loss: bool) -> Place | None:
        """Return the position in a line, or None if it has none."""
        if match := OF_EPOCH.search(line):
            return self.of_epoch(match[1], match[2], int(match[3]), int(match[4]))
        if bar := BAR.search(line):
            words, done, total = line[: bar.start()], int(bar[1]), int(bar[2])
            if epoch := EPOCH.search(words):
                return self.of_epoch(epoch[1], epoch[2], done, total)
            return self.of_bar(done, total) if has_loss or not words.strip() else None
        match = next(filter(None, (pattern.search(line) for pattern in NAMED)), None)
        return match and (whole(match[1]), whole(match[2]) if match[2] else None)

    def of_epoch(self, epoch: str, epochs: str | None, step: int, steps: int) -> Place:
        self.from_zero = self.from_zero or int(epoch) == 0
        before = int(epoch) - (not self.from_zero)
        return before * steps + step, steps * int(epochs) if epochs else None

    def of_bar(self, done: int, total: int) -> Place | None:
        """Return the position of a progress bar, which may start again with each epoch.

        Return None for a shorter bar, which belongs to an evaluation.
        """
        if total < self.total:
            return None
        if total > self.total:
            self.total, self.done, self.rounds = total, 0, 0
        self.rounds += done < self.done
        self.done = done
        return self.rounds * total + done, None if self.rounds else total


def losses_in(line: str) -> dict[str, float | None]:
    """Return the training loss and the evaluation loss in a line, if it has them."""
    best: dict[str, tuple[int, str]] = {}
    for match in LOSS.finditer(line):
        before, after = match[1] or "", match[2] or ""
        words = line[max(0, match.start() - WORD_BEFORE_CHARACTERS) : match.start()]
        if NO_LOSS.search(words.rpartition("  ")[2] + before) or NO_LOSS.search(after):
            continue
        evaluated = OF_EVALUATION.search(before) or OF_EVALUATION.search(after)
        # `loss` itself takes precedence over a total loss, and that over a partial one.
        order = 2 * bool(before or after) - bool(OF_TRAINING.match(before))
        name = "val_loss" if evaluated else "loss"
        best[name] = min(best.get(name, (9, "")), (order, match[3]), key=lambda pair: pair[0])
    return {name: number(float(value)) for name, (_, value) in best.items()}


def whole(text: str) -> int:
    return int(text.replace(",", "") or 0)
