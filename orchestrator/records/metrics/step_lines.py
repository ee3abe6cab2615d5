"""Reads the step, the loss and the like from the lines that training programs print; pure.

A program says how far it is in its own words: `step 12 loss 0.3`, `{'loss': 0.3, 'epoch': 1}` below
a progress bar, `Epoch [2/5], Step [100/600], Loss: 2.2`, a table with a row for each value. What is
ambiguous is left out: no curve misleads less than a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# What a program prints is not trusted: none of these may look at a long line again and again.
NUMBER = r"([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?|nan|inf)\b"
GAP = r"\s{0,16}"
WHOLE = r"(\d[\d,]{0,18})(?!\w|\.\d)"
COUNT = r"(\d{1,19})"
OF_ALL = rf"(?:{GAP}(?:/|of){GAP}{WHOLE})?"
IS = rf"['\"]?{GAP}(?:[:=#|\[(]{GAP}){{0,2}}['\"]?"  # between a name and its value
COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
NEWS = re.compile(r"loss|step|iter|update|batch|epoch|%\||\[|━|train:", re.IGNORECASE)
LONGEST_CHARACTERS = 2000
OF_THE_RUN = "train_runtime"  # in the last line of transformers, whose loss is the run's mean

# -- losses -----------------------------------------------------------------------------------

LOSS = re.compile(
    rf"(?<!\w)(?:(\w+)[ _/.-])??loss([/_.][\w/.]*)?(?:[ _](?:train|avg|mean|total|value))?{IS}"
    rf"(?:tensor\()?{NUMBER}",
    re.IGNORECASE,
)
OF_EVALUATION = re.compile(r"(?:^|[_/.])(?:val(?!ue)|eval|test|dev)", re.IGNORECASE)
OF_TRAINING = re.compile(r"train|total|running", re.IGNORECASE)
NO_LOSS = re.compile(
    r"(?:^|[_/. ])(?:best|min|max|lowest|last|prev|previous|target|scale|weight|coef\w*|fn|func)"
    r"(?:$|[_/. ])",
    re.IGNORECASE,
)
# Parts of a loss that no training goes by alone.
OF_A_SIDE = re.compile(
    r"(?:^|_)(?:value|value_function|vf|critic|entropy|aux\w*|kl|reg\w*|lb|balanc\w*|z)$",
    re.IGNORECASE,
)
WORD_BEFORE_CHARACTERS = 12  # in which a word such as `best` stands before `val loss`
# A line that an evaluation begins: `Test: [11/13] Loss 2.1`, `| valid | loss 9.9`. It counts
# batches of its own, and what it calls the loss is not the training's.
EVALUATION = re.compile(
    rf"(?:^|[|\])>:-]|\b(?:INFO|DEBUG|completed)\b){GAP}"
    r"(?:test|testing|val|valid|validat(?:e|ing|ion)|eval|evaluat(?:e|ing|ion)|dev|cv)\b"
    rf"(?![ _/.-]?loss{IS}{NUMBER})",
    re.IGNORECASE,
)
# `Iter(val) [250/250]`, `Epoch (valid): 4/4`, `[Eval batch=5/50]`, `validation steps: 5/8`: what is
# counted is no step of the training.
OWN_COUNT = re.compile(
    r"\((?:test|val|valid|validation|eval)\)"
    r"|(?<!\w)(?:test|val|valid|validation|eval|evaluation|dev)[ _]"
    r"(?:step|iter|iteration|batch)s?\b",
    re.IGNORECASE,
)
TRAINING_WORDS = re.compile(r"loss|step|iter|update|batch|epoch|train", re.IGNORECASE)

# -- counts -----------------------------------------------------------------------------------

OF_TRAINING_STEPS = "(?:global|train(?:ing)?|current|opt(?:imi[sz]er)?|num)"  # no `warmup_steps`
NAMED = {  # the surest first
    name: re.compile(
        rf"(?<![\w./-])(?:{OF_TRAINING_STEPS}[ _/])?{words}{IS}{WHOLE}{OF_ALL}", re.IGNORECASE
    )
    for name, words in {
        "step": "step(?:/max_steps)?",
        "iteration": "iter(?:ation)?",
        "update": "updates?",
        "batch": "batch",
    }.items()
}
EPOCH = re.compile(rf"(?<!\w)epoch(?:\(\w{{1,16}}\))?{IS}{NUMBER}{OF_ALL}", re.IGNORECASE)
# Counts of one epoch's batches, with the epoch where it stands beside them: epoch, epochs, step,
# steps. imagenet, DETR, mmengine, DCGAN: `[0/25][50/1583]`; timm: `Train: 0 [  50/1251 (  4%)]`;
# a tutorial: `[1,  2000]`.
WITH_EPOCH = (
    re.compile(rf"\[{GAP}{COUNT}(?:/{COUNT})?{GAP}\]{GAP}\[{GAP}{COUNT}{GAP}/{GAP}{COUNT}{GAP}\]"),
    re.compile(rf"train:{GAP}{COUNT}(){GAP}\[{GAP}{COUNT}{GAP}/{GAP}{COUNT}", re.IGNORECASE),
    re.compile(rf"^{GAP}\[{COUNT}(),{GAP}{COUNT}()\]"),
    re.compile(rf"\bTRAIN \|[^|]{{0,99}}\|{GAP}Batch {COUNT}()/{COUNT}() "),  # WeNet's
)
# MNIST: `[640/60000 (1%)]`; `200/ 2983 batches`; Keras: `10/32 ━━━`.
OF_EPOCH = (
    re.compile(rf"\[{GAP}{COUNT}{GAP}/{GAP}{COUNT}{GAP}(?:\(|\])"),
    re.compile(
        rf"(?<![\w./]){COUNT}{GAP}/{GAP}{COUNT}{GAP}(?:batches|steps|iterations|iters|updates)\b"
    ),
    re.compile(rf"^{GAP}{COUNT}/{COUNT}{GAP}━"),
    re.compile(rf"━ {COUNT}/{COUNT} "),  # of rich
)
BAR = re.compile(  # of tqdm, with the words before it
    rf"^([^|]*?)(?<!\d)\d{{1,3}}%\|[^|]*\|{GAP}{COUNT}/{COUNT} \["
)
OF_TORCHTUNE = re.compile(rf"^\s*\d+\|{WHOLE}\|Loss")
# A row of a table with a line for each value: which row is of which step is ambiguous.
ROW = re.compile(rf"{GAP}\|{GAP}[\w/.-]{{1,60}}{GAP}\|{GAP}{NUMBER}{GAP}\|{GAP}", re.IGNORECASE)
MORE = {
    "lr": re.compile(rf"(?<!\w)(?:lr|learning_rate){IS}{NUMBER}", re.IGNORECASE),
    "grad_norm": re.compile(rf"(?<!\w)grad[ _]?norm{IS}{NUMBER}", re.IGNORECASE),
    "tokens_per_s": re.compile(rf"(?<!\w)(?:tps|tok(?:ens)?/s(?:ec)?){IS}{WHOLE}", re.IGNORECASE),
}


OF_A_PART = 2  # the order of a loss that is named as one of several


@dataclass(frozen=True)
class Loss:
    """One loss of a line: the words before and after `loss`, and its value."""

    before: str
    after: str
    value: str

    @property
    def of_evaluation(self) -> bool:
        return bool(OF_EVALUATION.search(self.before) or OF_EVALUATION.search(self.after))

    @property
    def of_epoch(self) -> bool:
        return "epoch" in self.before.lower()

    @property
    def of_a_side(self) -> bool:
        return bool(OF_A_SIDE.search(self.before))

    @property
    def order(self) -> int:
        """Rank it among the training's: `loss` itself, what is named as the whole, a part."""
        if not self.before and not self.after:
            return 0
        return 1 if OF_TRAINING.match(self.before) else OF_A_PART


def losses_of(line: str) -> Iterator[Loss]:
    for match in LOSS.finditer(line):
        loss = Loss(match[1] or "", match[2] or "", match[3])
        words = line[max(0, match.start() - WORD_BEFORE_CHARACTERS) : match.start()].rpartition(
            "  "
        )[2]
        if not NO_LOSS.search(words + loss.before) and not NO_LOSS.search(loss.after):
            yield loss


@dataclass(frozen=True)
class Place:
    """How far a training is: a step over all its epochs, and how many there are."""

    step: int
    steps: int | None = None


@dataclass
class Epochs:
    """Counts steps over all epochs, from lines that may count those of one."""

    epoch: int | None = None  # the last that was named,
    of: int | None = None  # and how many there are
    from_zero: bool = False
    begin_anew: bool | None = None  # whether the steps of an epoch do; None while that is unknown
    last: tuple[int, int] | None = None  # an epoch, and the last step that was named in it

    def name(self, epoch: int, of: int | None) -> None:
        self.epoch, self.of = epoch, of
        self.from_zero = self.from_zero or epoch == 0

    def place(self, step: int, steps: int | None, *, of_one: bool) -> Place | None:
        """Place a step of the epoch that was named last; None where that is ambiguous.

        `of_one` says that the form of the line counts the steps of one epoch.
        """
        if self.epoch is None:
            return Place(step, steps)
        if self.last is not None and self.epoch > self.last[0]:
            self.begin_anew = step <= self.last[1]
        self.last = (self.epoch, step)
        before = max(0, self.epoch - (0 if self.from_zero else 1))
        begin_anew = of_one or self.begin_anew
        if begin_anew is False:
            return Place(step, steps)
        if not before:
            whole = steps * self.of if steps and self.of and begin_anew else None
            return Place(step, whole)
        if begin_anew is None and steps is None:
            return Place(step)  # without a number of steps it is the number of this one
        if begin_anew is None or steps is None:
            return None
        return Place(before * steps + step, steps * self.of if self.of else None)


@dataclass
class Bar:
    """The progress bar that was shown last, and how often it began again."""

    done: int = 0
    total: int = 0
    rounds: int = 0
    with_losses: bool = False  # it has them in its own line

    @property
    def place(self) -> Place | None:
        whole = None if self.rounds else self.total
        return Place(self.rounds * self.total + self.done, whole) if self.total else None

    def show(self, done: int, total: int, *, sure: bool) -> None:
        """Move the bar. Another one within it, as of an evaluation, is passed over."""
        if total == self.total:
            self.rounds += done < self.done
            self.done = done
        elif sure or not (self.with_losses or self.done < self.total):
            self.done, self.total, self.rounds = done, total, 0
        self.with_losses = self.with_losses or sure


@dataclass
class StepReader:
    """Reads the lines of one rank, one after the other."""

    place: Place | None = None  # where it was when it last named a step
    epochs: Epochs = field(default_factory=Epochs)
    bar: Bar = field(default_factory=Bar)
    counts_both: bool = False  # steps, and the iterations in them

    def values(self, line: str) -> dict[str, Any]:
        """Return what a line says of a step and its loss; nothing if it says no loss."""
        if not NEWS.search(line):
            return {}
        line = COLORS.sub("", line[:LONGEST_CHARACTERS])
        if OWN_COUNT.search(line) or ROW.fullmatch(line):
            return {}
        losses = list(losses_of(line))
        if (head := EVALUATION.search(line)) and not TRAINING_WORDS.search(line[: head.start()]):
            return {}  # an evaluation, which counts batches of its own
        bar = BAR.search(line)
        place, named = self.find(line, bar, has_loss=bool(losses))
        if not losses or OF_THE_RUN in line:
            return {}
        chosen = training_loss(losses)
        evaluated = next((loss for loss in losses if loss.of_evaluation), None)
        if bar is not None:
            evaluated = None  # that of an evaluation before this bar
        if not (named or self.bar.total) and (epoch := EPOCH.search(line)) and epoch[1].isdigit():
            return {}  # of a whole epoch, which may have more steps than were printed
        if not named:
            place = self.bar.place or self.place
        elif chosen and evaluated and not chosen.of_epoch and chosen.order == 1:
            chosen = None  # what an evaluation estimates of the training's loss
        if place is None or not (chosen or evaluated):
            return {}
        return described(line, place, chosen, evaluated)

    def find(
        self, line: str, bar: re.Match[str] | None, *, has_loss: bool
    ) -> tuple[Place | None, bool]:
        """Find the place that a line names, and tell whether it names one, if only ambiguously."""
        epoch = EPOCH.search(line)
        if epoch and epoch[1].isdigit():
            self.epochs.name(int(epoch[1]), whole(epoch[2]) if epoch[2] else None)
        if match := OF_TORCHTUNE.search(line):
            self.place = Place(whole(match[1]))
            return self.place, True
        if bar is not None and (epoch or not bar[1].strip()):
            return self.of_bar(bar, epoch, has_loss=has_loss)
        counted = self.named(line, epoch) if bar else self.counts(line, epoch, has_loss=has_loss)
        for candidate in counted:
            self.place = candidate
            return candidate, True
        return self.of_bar(bar, epoch, has_loss=has_loss) if bar else (None, False)

    def of_bar(
        self, bar: re.Match[str], epoch: re.Match[str] | None, *, has_loss: bool
    ) -> tuple[Place | None, bool]:
        done, total = int(bar[2]), int(bar[3])
        if epoch:
            self.place = self.epochs.place(done, total, of_one=True)
            return self.place, True
        if bar[1].strip() and not has_loss:
            return None, False  # of something else: it maps a data set, or saves
        self.bar.show(done, total, sure=has_loss)
        return (self.bar.place, True) if has_loss else (None, False)

    def counts(
        self, line: str, epoch: re.Match[str] | None, *, has_loss: bool
    ) -> Iterator[Place | None]:
        """Yield the place that a line counts in numbers, by the surest form first."""
        for pattern in WITH_EPOCH:
            if match := pattern.search(line):
                self.epochs.name(int(match[1]), int(match[2]) if match[2] else None)
                steps = int(match[4]) if match[4] else None
                yield self.epochs.place(int(match[3]), steps, of_one=True)
        yield from self.named(line, epoch)
        for pattern in OF_EPOCH:
            after = epoch.end() if epoch else 0  # `Epoch [1/10]: [5/938]`
            if (has_loss or epoch) and (match := pattern.search(line, after)):
                yield self.epochs.place(int(match[1]), int(match[2]), of_one=True)

    def named(self, line: str, epoch: re.Match[str] | None) -> Iterator[Place | None]:
        """Yield the place that a line names: `step 5`, `iter 10/100`."""
        found = {name: match for name in NAMED if (match := NAMED[name].search(line))}
        if "step" in found and "iteration" in found:
            del found["iteration"]
            self.counts_both = True  # a step has several iterations
        if "iteration" in found and self.counts_both:
            yield None
            return
        for name, match in found.items():
            step = whole(match[1])
            steps = whole(match[2]) if match[2] else None
            if epoch is None:
                yield Place(step, steps)
            else:
                of_one = name == "batch" or "[" in line[match.start() : match.start(1)]
                yield self.epochs.place(step, steps, of_one=of_one and steps is not None)


def training_loss(losses: list[Loss]) -> Loss | None:
    """Choose the loss that the training goes by: the first of those that are named best."""
    named = (loss for loss in losses if not loss.of_evaluation and not loss.of_a_side)
    return min(named, key=lambda loss: loss.order, default=None)


def described(
    line: str, place: Place, training: Loss | None, evaluated: Loss | None
) -> dict[str, Any]:
    """Return the values of a line under the names that the engine's metrics have."""
    values: dict[str, Any] = {"step": place.step}
    if training is not None:
        values["loss"] = number(training.value)
    if evaluated is not None:
        values["val_loss"] = number(evaluated.value)
    if place.steps is not None:
        values["steps"] = place.steps
    for name, pattern in MORE.items():
        if match := pattern.search(line):
            values[name] = number(match[1])
    if epoch := EPOCH.search(line):
        values["epoch"] = number(epoch[1])
    return values


def whole(text: str) -> int:
    return int(text.replace(",", "") or 0)


def number(text: str) -> float | None:
    """Return a number; None, which JSON has, for one that is none or has no end."""
    value = float(text.replace(",", ""))
    return value if abs(value) < float("inf") else None
