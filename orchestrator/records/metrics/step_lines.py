"""Reads the step, the loss and the like from the lines that training programs print; pure.

A program says how far it is in its own words: `step 12 loss 0.3`, `{'loss': 0.3, 'epoch': 1}` below
a progress bar, `Epoch [2/5], Step [100/600], Loss: 2.2`, `12|Loss: 0.3:  5%|...| 12/240 [00:02<`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

# What a program prints is not trusted: none of these may look at a long line again and again.
NUMBER = r"([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?|nan|inf)\b"
GAP = r"\s{0,16}"
WHOLE = r"(\d[\d,]{0,18})(?!\w|\.\d)"
OF_ALL = rf"(?:{GAP}(?:/|of){GAP}{WHOLE})?"
IS = rf"['\"]?{GAP}(?:[:=#|\[(]{GAP}){{0,2}}['\"]?"  # between a name and its value
COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
OWN = "(?:global|train(?:ing)?|current|opt(?:imi[sz]er)?)"  # and not `warmup_steps`
LOSS = re.compile(
    rf"(?<!\w)(?:(\w+)[ _/.-])??loss(?:[/_.][\w/.]*)?(?:[ _](?:train|avg|mean|total))?{IS}"
    rf"(?:tensor\()?{NUMBER}",
    re.IGNORECASE,
)
OF_EVALUATION = re.compile(r"val|eval|test|dev", re.IGNORECASE)
STEPS = tuple(  # the surest first
    re.compile(rf"(?<![\w./-])(?:{OWN}[ _/])?{name}{IS}{WHOLE}{OF_ALL}", re.IGNORECASE)
    for name in ("step", "iter(?:ation)?", "update", "batch")
)
OF_TORCHTUNE = re.compile(rf"^\s*\d+\|{WHOLE}\|Loss")
BRACKET = re.compile(
    rf"\[{GAP}(\d{{1,19}}){GAP}/{GAP}(\d{{1,19}}){GAP}(?:\(|\])"
)  # [ 20/100] and [640/60000 (1%)]
BAR = re.compile(
    rf"^([^|]*?)(?<!\d)\d{{1,3}}%\|[^|]*\|{GAP}(\d{{1,19}})/(\d{{1,19}}) \["
)  # of tqdm, with what is before it
EPOCH = re.compile(rf"(?<!\w)epoch{IS}{NUMBER}{OF_ALL}", re.IGNORECASE)
MORE = {
    "lr": re.compile(rf"(?<!\w)(?:lr|learning_rate){IS}{NUMBER}", re.IGNORECASE),
    "grad_norm": re.compile(rf"(?<!\w)grad[ _]?norm{IS}{NUMBER}", re.IGNORECASE),
    "tokens_per_s": re.compile(rf"(?<!\w)(?:tps|tok(?:ens)?/s(?:ec)?){IS}{WHOLE}", re.IGNORECASE),
}
ANY = re.compile(r"loss|step|iter|update|batch|epoch|%\||\[", re.IGNORECASE)  # else: no news
LONGEST = 2000  # characters


@dataclass
class Place:
    """How far one rank was when it last told, for lines that have a loss and no step."""

    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    from_zero: bool = False  # its epochs count from 0


def values(line: str, place: Place) -> dict[str, Any]:
    """Return what a line tells of a step and its loss; nothing if it tells no loss."""
    if not ANY.search(line):
        return {}
    line = COLORS.sub("", line[:LONGEST])
    found = [(match[1] or "", match[2]) for match in LOSS.finditer(line)]
    look_for_step(line, place)
    if not found or place.step is None:
        return {}
    losses = [(before, value) for before, value in found if not OF_EVALUATION.match(before)]
    name = "loss" if losses else "val_loss"
    told: dict[str, Any] = {"step": place.step, name: number((losses or found)[0][1])}
    if place.steps is not None:
        told["steps"] = place.steps
    for other, pattern in MORE.items():
        if match := pattern.search(line):
            told[other] = number(match[1])
    if epoch := EPOCH.search(line):
        told["epoch"] = number(epoch[1])
    return told


def look_for_step(line: str, place: Place) -> None:
    """Find the step that a line names, or a progress bar that has no name of its own."""
    epoch = EPOCH.search(line)
    if epoch and epoch[1].isdigit():
        place.epoch = int(epoch[1])
        place.from_zero = place.from_zero or place.epoch == 0
    if match := OF_TORCHTUNE.search(line):
        place.step, place.steps = whole(match[1]), None
        return
    for at, pattern in enumerate((*STEPS, BRACKET)):
        if match := pattern.search(line):
            steps = whole(match[2]) if match[2] else None
            within = steps is not None or at >= len(STEPS) - 1  # of an epoch, if the line has one
            settle(place, whole(match[1]), steps, epoch if within else None)
            return
    if (match := BAR.search(line)) and (epoch or not match[1].strip()):
        settle(place, whole(match[2]), whole(match[3]), epoch)


def settle(place: Place, step: int, steps: int | None, epoch: re.Match[str] | None) -> None:
    """Count the steps of earlier epochs, too, where a line counts those of one."""
    if epoch and steps and place.epoch is not None:
        begun = place.epoch - (0 if place.from_zero else 1)
        step += max(0, begun) * steps
        steps = whole(epoch[2]) * steps if epoch[2] else None
    place.step, place.steps = step, steps


def whole(text: str) -> int:
    return int(text.replace(",", "") or 0)


def number(text: str) -> float | None:
    """Return a number; None, which JSON has, for one that is none or has no end."""
    value = float(text.replace(",", ""))
    return value if abs(value) < float("inf") else None
