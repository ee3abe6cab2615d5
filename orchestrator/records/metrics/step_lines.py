"""Reads steps and losses from the lines that a training program prints, without side effects.

A line with both is read: `step 12/100 loss 0.3`. The step may also be in a progress bar or in a
line above: transformers prints `{'loss': 0.3}` below its bar. A count of batches is combined with
the epoch: `Epoch [2/5], Step [100/600], Loss: 2.2`. A count that begins again with an epoch goes
on from the last step. What a line does not say for certain is left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from orchestrator.records.metrics.lines import finite_number

# A program's output is not trusted: none of these may scan a long line repeatedly.
NUMBER = r"([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?|nan|inf)\b"
GAP = r"\s{0,16}"
WHOLE = r"(\d[\d,]{0,18})(?!\w|\.\d)"
COUNT = r"(\d{1,19})"
OF_ALL = rf"(?:{GAP}(?:/|of){GAP}{WHOLE})?"
# Matches the separator between a name and its value.
IS = rf"['\"]?{GAP}(?:[:=#|\[(]{GAP}){{0,2}}['\"]?"
COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ANSWER_FILE = re.compile(r"loss|step|iter|update|batch|epoch|round|%\||\[|val|test", re.IGNORECASE)
LONGEST_CHARACTERS = 2000

LOSS = re.compile(
    rf"(?<!\w)(?:(\w+)[ _/.-])??loss([/_.][\w/.]*)?(?:[ _](?:train|avg|mean|total|value))?{IS}"
    rf"(?:tensor\(\[?)?{NUMBER}",
    re.IGNORECASE,
)
OF_EVALUATION = re.compile(r"(?:^|[_/. ])(?:val(?!ue)|eval|test|dev)", re.IGNORECASE)
OF_TRAINING = re.compile(r"train|total|running", re.IGNORECASE)
# Words of values that are not the loss of this step, or only a part of it.
NO_LOSS = re.compile(
    r"(?:^|[_/. ])(?:best|min|max|lowest|last|final|initial|prev|previous|target|scale|weight"
    r"|coef\w*|fn|func|value|value_function|vf|critic|entropy|aux\w*|kl|reg\w*|lb|balanc\w*|z)"
    r"(?:$|[_/. ])",
    re.IGNORECASE,
)
# Words such as `best` stand within this distance before `val loss`.
WORD_BEFORE_CHARACTERS = 12
EVALUATIONS = "test(?:ing)?|val(?:id|idation|idating)?|eval(?:uation|uating)?|dev|cv|sanity"
# Matches an evaluation, which counts own batches: `Test: [11/13] Loss 2.1`, `[Eval batch=5/50]`.
EVALUATION = re.compile(
    rf"(?:^|[|\[(\])>:-]|\b(?:INFO|DEBUG)\b"
    rf"|(\b(?:split|phase|mode|stage|msg)['\"]?{GAP}[:=]{GAP}['\"]?)){GAP}"
    rf"(?:{EVALUATIONS})\b(?![ _/.-]?loss{IS}{NUMBER})",
    re.IGNORECASE,
)
# Follows the word if it belongs to a value behind those of the training: `| Val Acc: 0.9`.
OF_A_VALUE = re.compile(r"[ _][\w@]{1,32}[ :=]")
# Matches the heading of an evaluation, whose lines may look like those of the training.
HEADING = re.compile(rf"\b(?:{EVALUATIONS})\b(?!.*(?:loss|[|\[]))", re.IGNORECASE)
# Matches a row in a table of results, a summary, the loss in a checkpoint, and the mean loss of the
# run in the last line of transformers.
NO_POINT = re.compile(
    r"^\s{1,16}[\w/.-]{1,64}\s{1,64}=\s{1,64}\S+\s*$"
    r"|^[\s│┃|]{0,32}[\w/.-]{1,64}\s{3,64}[│┃|]?\s{0,64}[\w.+-]{1,64}\s{0,64}[│┃|]?\s*$"
    r"|^wandb:|train_runtime"
    r"|\b(?:load|restor|resum)(?:ed|ing) (?:from|checkpoint|model|weights|the)\b",
    re.IGNORECASE,
)
# The most reliable pattern is first. `warmup_steps` and `step time` do not match.
NAMED = [
    re.compile(
        rf"(?<![\w./-])(?:(?:global|train(?:ing)?|current|opt(?:imi[sz]er)?|num)[ _/]){{0,2}}"
        rf"{words}{IS}{WHOLE}{OF_ALL}",
        re.IGNORECASE,
    )
    for words in ("step(?:/max_steps)?", r"iter(?:ation)?(?:\(train\))?", "updates?", "batch")
]
# Matches an epoch and the count of its batches:
# `Epoch: [0][ 10/100]`, `[0/25][50/1583]`, `Train: 0 [5/9`.
OF_EPOCH = re.compile(
    rf"(?:(?:epoch|train)(?:\(\w{{1,16}}\))?[\s:=\[]{{0,6}}|\[{GAP}){COUNT}(?:/{COUNT})?"
    rf"[\s,:|\]\[]{{0,8}}(?:(?:iter(?:ation)?|batch|update)[\s:=\[]{{0,4}}|(?:step {GAP})?\[{GAP}"
    rf"|(?<=\[)){COUNT}{GAP}/{GAP}{COUNT}",
    re.IGNORECASE,
)
EPOCH = re.compile(
    rf"(?<!\w)(?<!(?:best|last|from) )(?<!(?:max|num) )(?<!total )(?:epoch|round)[\s:=\[(]{{0,6}}"
    rf"{COUNT}(?:/{COUNT})?(?![\d.])",
    re.IGNORECASE,
)
# Matches a progress bar of tqdm that counts no bytes.
BAR = re.compile(rf"(?<!\d)\d{{1,3}}%\|[^|]*\|{GAP}{COUNT}/{COUNT} \[(?![^\]]*B/s)")
# Lightning counts epochs from 0, and names the last one behind the slash; so with rich.
RICH_BAR = re.compile(
    r"epoch \d{1,9}/-?\d{1,9} {1,4}[━╸╺ ]{1,200}(\d{1,19})/(\d{1,19}) ", re.IGNORECASE
)
OF_LIGHTNING = re.compile(rf"v_num|{RICH_BAR.pattern}", re.IGNORECASE)
# Matches a count of batches without a word: `1/5, train_loss: 0.9`, `5/9 - 3s - loss: 0.5`,
# `loss: 2.3  [  64/60000]`, `Training  [  10/1250]`.
BATCHES = re.compile(
    rf"{COUNT}/{GAP}{COUNT} batches"
    rf"|^{GAP}{COUNT}/{COUNT}{GAP}(?:, (?=\w{{0,16}}loss)|\[[=>.]|━|- \d{{1,9}}m?s\b)"
    rf"|\d {{1,4}}\[{GAP}{COUNT}/{COUNT}\]{GAP}$|training {{1,4}}\[{GAP}{COUNT}/{COUNT}\]",
    re.IGNORECASE,
)
MORE = {
    "lr": re.compile(rf"(?<!\w)(?:lr|learning_rate){IS}{NUMBER}", re.IGNORECASE),
    "grad_norm": re.compile(rf"(?<!\w)grad[ _]?norm{IS}{NUMBER}", re.IGNORECASE),
    "tokens_per_s": re.compile(rf"(?<!\w)(?:tps|tok(?:ens)?/s(?:ec)?){IS}{WHOLE}", re.IGNORECASE),
}


# The step of a training over all epochs, and the number of steps if known.
Place = tuple[int, int | None]
Losses = dict[str, float | None]
# The kinds of counts without a word. That of another count is the index of its pattern in NAMED.
OF_EPOCHS, OF_BARS, OF_BATCHES = -3, -2, -1


@dataclass(frozen=True)
class Count:
    """A count of steps in a line: its kind, the step, the number of steps, and the epoch."""

    kind: int
    step: int
    steps: int | None
    epoch: int | None = None


@dataclass
class StepReader:
    """Reads the lines of one rank in order."""

    # The position that was read last, and the count of the last training loss.
    place: Place | None = None
    last: Count | None = None
    # The count in a line above, which the losses below it belong to.
    above: Count | None = None
    # The first count since counts began again, the distance of two, and the steps before.
    first: int = 0
    gap: int = 0
    before: int = 0
    # The epoch that was named last, and the number of epochs.
    epoch: int | None = None
    epochs: int | None = None
    # True if epochs are counted from 0.
    from_zero: bool = False
    # True within an evaluation: counts that begin again are its own.
    evaluates: bool = False
    # The total of the last progress bar, and its last count.
    total: int = 0
    done: int = 0
    # How often that bar started again.
    rounds: int = 0
    # The evaluation loss in the last bar: bars repeat it.
    repeated: float | None = None

    def values(self, line: str) -> dict[str, Any]:
        """Return the step, the losses and further values of a line, or {} if it has no loss."""
        line = COLORS.sub("", line[:LONGEST_CHARACTERS])
        if not ANSWER_FILE.search(line) or NO_POINT.search(line):
            return {}
        if word := EVALUATION.search(line):
            self.evaluates |= bool(HEADING.search(line))
            of_a_value = not word[1] and OF_A_VALUE.match(line, word.end())
            line = line[: word.start()] if of_a_value else ""
        losses = losses_in(line)
        epoch = EPOCH.search(line) or OF_EPOCH.search(line)
        if epoch:
            self.name_epoch(int(epoch[1]), epoch[2], lightning=OF_LIGHTNING.search(line))
        count = self.find(line, has_loss=bool(losses))
        if not losses:
            self.above = count or self.above
            self.evaluates |= count is None and bool(HEADING.search(line))
            return {}
        place = self.placed(self.count_of(count, losses, of_epoch=bool(epoch)), losses)
        if BAR.search(line):
            before, self.repeated = self.repeated, losses.get("val_loss", self.repeated)
            if before == self.repeated:
                losses.pop("val_loss", None)
        if place is None or not losses:
            return {}
        self.place = place
        values: dict[str, Any] = {"step": place[0], **losses}
        if place[1] is not None:
            values["steps"] = place[1]
        for name, pattern in MORE.items():
            if match := pattern.search(line):
                values[name] = finite_number(float(match[1].replace(",", "")))
        return values

    def count_of(self, count: Count | None, losses: Losses, *, of_epoch: bool) -> Count | None:
        """Return the count that the losses of a line belong to, which has this count or none."""
        if count is None and of_epoch and (self.above is None or self.above.kind == OF_BARS):
            if self.last is None or self.last.kind == OF_EPOCHS:
                return Count(OF_EPOCHS, self.epoch or 0, self.epochs)
            # The mean of an epoch is no point of a curve of steps.
            losses.pop("loss", None)
        self.above = self.above if count is None else None
        return count or self.above

    def placed(self, count: Count | None, losses: Losses) -> Place | None:
        """Return the position of losses with this count, or None if it is uncertain."""
        last, trains = self.last, "loss" in losses
        if count is None or (self.evaluates and not trains):
            return self.place
        if last is None:
            self.first = count.step if trains else 0
        elif count.step < last.step or (
            count.step == last.step == self.first and (count.epoch or 0) > (last.epoch or 0)
        ):
            if not trains:
                # Evaluations count their own batches.
                self.evaluates = True
                return self.place
            if not self.begins_again(count, last):
                return None
            steps = 0 if count.kind == OF_BATCHES else count.steps or 0
            gap = self.gap or last.step or 1
            self.before += steps if steps >= last.step else last.step + gap - count.step
            self.first = count.step
        if trains:
            if last is not None and count.step > last.step:
                self.gap = count.step - last.step
            self.last, self.evaluates = count, False
        return self.before + count.step, None if self.before else count.steps

    def begins_again(self, count: Count, last: Count) -> bool:
        """Return True if a lower count is the first of another epoch, or of another training."""
        if self.evaluates or count.kind != last.kind:
            return False
        if count.epoch is None or last.epoch is None:
            return count.step <= self.first
        return count.epoch > last.epoch or (count.epoch < last.epoch and count.step <= self.first)

    def name_epoch(self, epoch: int, epochs: str | None, *, lightning: object) -> None:
        self.evaluates = self.evaluates and epoch == self.epoch
        self.from_zero = self.from_zero or epoch == 0 or bool(lightning)
        self.epoch = epoch
        if epochs:
            self.epochs = int(epochs) + bool(lightning)

    def find(self, line: str, *, has_loss: bool) -> Count | None:
        """Return the count in a line, or None if it has none."""
        if match := OF_EPOCH.search(line):
            return self.in_epoch(int(match[3]), int(match[4]))
        if bar := BAR.search(line) or RICH_BAR.search(line):
            words, done, total = bar.string[: bar.start()], int(bar[1]), int(bar[2])
            if bar.re is RICH_BAR or EPOCH.search(words):
                return self.in_epoch(done, total)
            return self.of_bar(done, total) if has_loss or not words.strip() else None
        for kind, pattern in enumerate(NAMED):
            if match := pattern.search(line):
                steps = whole(match[2]) if match[2] else None
                return Count(kind, whole(match[1]), steps, self.epoch)
        match = BATCHES.search(line) if has_loss else None
        return match and self.in_epoch(*(int(part) for part in match.groups() if part))

    def in_epoch(self, step: int, steps: int) -> Count:
        """Return the count of a batch in the epoch that is named."""
        before = max(0, (self.epoch or 0) - (not self.from_zero)) * steps
        in_all = steps * self.epochs if self.epochs else None
        return Count(OF_BATCHES, before + step, in_all, self.epoch)

    def of_bar(self, done: int, total: int) -> Count | None:
        """Return the count of a progress bar, which may start again with each epoch.

        Return None for a shorter bar, which belongs to an evaluation.
        """
        if total < self.total and (self.last is not None or self.done < self.total):
            return None
        if total != self.total:
            self.total, self.done, self.rounds = total, 0, 0
        self.rounds += done < self.done
        self.done = done
        return Count(OF_BARS, self.rounds * total + done, None if self.rounds else total)


def losses_in(line: str) -> Losses:
    """Return the training loss and the evaluation loss in a line, if it has them."""
    losses: Losses = {}
    for match in sorted(LOSS.finditer(line), key=precedence):
        before, after = match[1] or "", match[2] or ""
        words = line[max(0, match.start() - WORD_BEFORE_CHARACTERS) : match.start()]
        if not (NO_LOSS.search(words.rpartition("  ")[2] + before) or NO_LOSS.search(after)):
            evaluated = OF_EVALUATION.search(before) or OF_EVALUATION.search(after)
            losses.setdefault("val_loss" if evaluated else "loss", finite_number(float(match[3])))
    return losses


def precedence(match: re.Match[str]) -> int:
    """Return a lower number for `loss` itself than for a total loss, and for that than a part."""
    return 2 * bool(match[1] or match[2]) - bool(OF_TRAINING.match(match[1] or ""))


def whole(text: str) -> int:
    return int(text.replace(",", "") or 0)
