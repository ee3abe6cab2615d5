"""Chooses which metrics share a chart, and in which order the charts stand. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from orchestrator.records.metrics import curves
from orchestrator.records.metrics.curves import Curve
from orchestrator.records.metrics.names import WORDS, better, unit_of
from orchestrator.views.report.story import Machines, Story, Training

SPEED = "Speed"
# The title, the unit, and the metrics of each chart that every training may have.
KNOWN = (
    ("Loss", "", ("loss", "eval_loss")),
    (SPEED, "/s", ("tokens_per_s",)),
    ("Step time", "ms", ("step_ms",)),
    ("Learning rate", "", ("lr",)),
    ("Norm of the gradients", "", ("grad_norm",)),
    ("Utilization of the device", "ratio", ("mfu", "mfu_measured")),
    ("Memory", "bytes", ("memory_bytes", "memory_peak_bytes")),
)
PARTS = ("data_ms", "forward_backward_ms", "optimizer_ms")  # of a step, one after the other
# The same of the machines: a chart for each name, over the time of the job.
OF_MACHINES = (
    ("GPUs: use", "ratio", "gpu"),
    ("GPUs: memory", "bytes", "gpu_memory"),
    ("GPUs: temperature of the hottest", "°C", "celsius"),
    ("GPUs: power", "W", "watts"),
    ("GPUs: clock", "MHz", "mhz"),
    ("Processors: use", "ratio", "cpu"),
    ("Memory of the machine", "bytes", "memory"),
    ("Swap", "bytes", "swap"),
    ("Network: received", "B/s", "received"),
    ("Network: sent", "B/s", "sent"),
    ("Disks: read", "B/s", "disk_read"),
    ("Disks: written", "B/s", "disk_write"),
)
MAPPED = ("gpu", "cpu", "received", "mhz")  # of many nodes, also a map
MOST_LINES = 8  # nodes that have a line each: more cannot be told apart
WITHOUT = (
    "tokens",
    "epoch",
    "steps",
    "left_s",
    "skipped_steps",
    "lost_steps",
    "exposed_comm_ms",
    "saved_step",
    "saved_bytes",
    "saved_s",
    *PARTS,
)
SOLID = 4  # lines of one chart that are told apart by color alone: the next ones are dashed
TRAINED, HELD_OUT = "train_", "val_"  # of what the Trainer says at the end of an epoch
NOTABLE = 0.05  # of a step: less is noise
NAMES = {**WORDS, "step_ms": "step", "loss": "training", "eval_loss": "held out"}


@dataclass(frozen=True)
class Line:
    """A curve and its look: one color for each run, and one dash for each metric, in all charts."""

    name: str
    curve: Curve
    color: int = 0
    dash: int = 0
    best: str = ""  # "least" or "most", where the metric's name tells which is better
    run: int | None = None  # the training whose steps these are, counted over all experiments


@dataclass(frozen=True)
class Mark:
    """Something that happened, at a step or a time since the start."""

    words: str
    bad: bool = False
    faint: bool = False
    step: int | None = None
    seconds: int | None = None


@dataclass(frozen=True)
class Axis:
    """Where steps lie on another axis: a line through these points."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class Chart:
    """One picture: lines over the steps, or areas on top of each other."""

    title: str
    unit: str
    lines: list[Line]
    stacked: bool = False
    over: str = "steps"  # or "time": seconds since the start; or "ranks"


@dataclass(frozen=True)
class Map:
    """One metric of all ranks as a picture, and what it says in words."""

    name: str
    unit: str
    map: curves.RankMap
    summary: str
    scale: float  # what a difference between ranks is compared with; 0: their median
    whose: str = "rank"  # or "node", over the time
    trainer: int = 0  # where the program has several


@dataclass(frozen=True)
class Run:
    """One Trainer of one experiment, among all that a page shows."""

    number: int
    name: str  # empty where there is one
    story: Story
    training: Training


def runs(stories: Sequence[Story]) -> list[Run]:
    pairs = [(story, training) for story in stories for training in story.trainings]
    return [
        Run(number, prefix(story, training, len(stories)), story, training)
        for number, (story, training) in enumerate(pairs)
    ]


def colors(stories: Sequence[Story]) -> list[int]:
    """Return the color of each experiment: that of its first run."""
    before = itertools.accumulate((max(1, len(story.trainings)) for story in stories), initial=0)
    return list(before)[:-1]


def charts(stories: Sequence[Story]) -> list[Chart]:
    """Return the charts of all experiments: the same metric of each in one chart."""
    every = runs(stories)
    units = {run.training.unit for run in every}
    names = dict.fromkeys(name for run in every for name in run.training.curves)
    known = {name for _, _, members in KNOWN for name in members} | set(WITHOUT)
    groups = [*KNOWN, *of_a_program(name for name in names if name not in known)]
    found = [Chart(title, unit, lines_of(every, members)) for title, unit, members in groups]
    if len(units) == 1:
        of_speed = f"Speed: {units.pop()}"
        found = [
            replace(chart, title=of_speed) if chart.title == SPEED else chart for chart in found
        ]
    found = [chart for chart in found if chart.lines]
    waits = [line for run in every if (line := exposed(run, len(every) > 1)) is not None]
    if waits:
        found.append(Chart("Exposed communication", "ratio", waits))
    return found + [chart for run in every if (chart := split(run)) is not None]


def axes(stories: Sequence[Story]) -> list[dict[str, Axis]]:
    """Return what else the steps of each run can be drawn over: the time, and its epochs."""
    return [
        {
            name: axis
            for name, axis in (
                ("time", since_start(run.story, run.training)),
                ("epoch", epochs(run.training)),
            )
            if len(axis.steps) > 1
        }
        for run in runs(stories)
    ]


def since_start(story: Story, training: Training) -> Axis:
    """Return when steps were logged; a step that was repeated counts when it was done at last."""
    began, times = story.record.started, training.times
    return rising(times.steps, [max(0.0, time - began) for time in times.highs])


def epochs(training: Training) -> Axis:
    """Return where each epoch began; the metrics count from 0."""
    known = training.curves.get("epoch", Curve())
    steps: list[int] = []
    values: list[float] = []
    for step, epoch in zip(known.steps, known.lows or known.means, strict=True):
        if not values or epoch > values[-1]:
            steps.append(step)
            values.append(epoch)
    return rising(steps, values)


def rising(steps: Sequence[int], values: Sequence[float]) -> Axis:
    """Leave out what goes back: no axis does."""
    axis = Axis([], [])
    for step, value in zip(steps, values, strict=True):
        if not axis.values or value > axis.values[-1]:
            axis.steps.append(step)
            axis.values.append(value)
    return axis


def of_a_program(names: Iterable[str]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield a chart for each metric of a program's own; one for both of an epoch's, on what it
    trained and on what was held out: whether they part is what people look for."""
    known = dict.fromkeys(names)
    for name in known:
        of = name.removeprefix(TRAINED)
        if of != name and HELD_OUT + of in known:
            yield f"{of[:1].upper()}{of[1:]} per epoch", unit_of(name), (name, HELD_OUT + of)
        elif not (name.startswith(HELD_OUT) and TRAINED + name.removeprefix(HELD_OUT) in known):
            yield name, unit_of(name), (name,)


def of_machines(stories: Sequence[Story]) -> list[Chart]:
    """Return what the machines did: a line for each node, or the range of many nodes."""
    known = [
        (color, story, story.machines)
        for color, story in zip(colors(stories), stories, strict=True)
        if story.machines is not None
    ]
    found = []
    for title, unit, name in OF_MACHINES:
        lines = [
            line
            for color, story, machines in known
            if name in machines.values
            for line in machine_lines(story, machines, name, color if len(stories) > 1 else None)
        ]
        if any(value for line in lines for value in line.curve.means):
            found.append(Chart(title, unit, lines, over="time"))
    return found


def machine_lines(story: Story, machines: Machines, name: str, color: int | None) -> list[Line]:
    """Return a line for each node, or one of all: with the color of its run, where it has one."""
    if color is not None or len(machines.nodes) > MOST_LINES:
        who = story.experiment.name if color is not None else f"mean of {len(machines.nodes)} nodes"
        return [Line(who, trimmed(machines.middle(name)), color or 0)]
    names = {node.index: node.name for node in story.record.nodes}
    lines = [
        Line(names.get(node, f"node {node}"), machines.line(name, row), row, row // SOLID)
        for row, node in enumerate(machines.nodes)
    ]
    return [line for line in lines if line.curve.means]


def marks(stories: Sequence[Story]) -> tuple[Mark, ...]:
    """Return what happened to the one job of a page; of several, the lists below tell it."""
    if len(stories) > 1:
        return ()
    began = stories[0].record.started
    return tuple(
        Mark(
            moment.words,
            moment.bad,
            moment.faint,
            moment.step,
            round(moment.time - began) if moment.time else None,
        )
        for story in stories
        for moment in story.moments
    )


def machine_maps(story: Story) -> list[Map]:
    """Return maps of many nodes, of which a chart shows the range alone."""
    machines = story.machines
    if machines is None or len(machines.nodes) <= MOST_LINES:
        return []
    titles = {name: (title, unit) for title, unit, name in OF_MACHINES}
    return [
        Map(
            titles[name][0], titles[name][1],
            curves.RankMap(machines.columns, machines.nodes, machines.values[name]),
            f"{titles[name][0]} of every node", 1.0 if titles[name][1] == "ratio" else 0.0, "node",
        )
        for name in MAPPED
        if name in machines.values
    ]  # fmt: skip


def exposed(run: Run, several: bool) -> Line | None:
    """Return the part of each step in which ranks only wait for communication."""
    whole = run.training.curves.get("step_ms")
    part = run.training.curves.get("exposed_comm_ms")
    if whole is None or part is None:
        return None
    lengths = dict(zip(whole.steps, whole.means, strict=True))
    pairs = zip(part.steps, part.means, strict=True)
    known = [(step, value / lengths[step]) for step, value in pairs if lengths.get(step)]
    if not known:
        return None
    curve = Curve([step for step, _ in known], [share for _, share in known])
    name = run.name if several else NAMES["exposed_comm_ms"]
    return Line(name, curve, run.number, best="least", run=run.number)


def prefix(story: Story, training: Training, count: int) -> str:
    """Tell a line's experiment and Trainer, where there are several."""
    words = [story.experiment.name] if count > 1 else []
    if len(story.trainings) > 1:
        words.append(f"Trainer {training.number}")
    return " ".join(words)


def lines_of(every: Sequence[Run], members: Sequence[str]) -> list[Line]:
    """Return a line for each run and metric: several runs differ by color, their metrics by dash;
    the metrics of one run differ by color."""
    shown = [name for name in members if any(name in run.training.curves for run in every)]
    lines = []
    for run in every:
        for kind, name in enumerate(shown):
            curve = run.training.curves.get(name)
            if curve is None:
                continue
            label = NAMES.get(name, name) if len(shown) > 1 or not run.name else ""
            color, dash = (run.number, kind) if len(every) > 1 else (kind, kind // SOLID)
            text = " ".join(filter(None, (run.name, label)))
            lines.append(Line(text, trimmed(curve), color, dash, better(name), run.number))
    return lines


def split(run: Run) -> Chart | None:
    """Divide the time of a step into its parts; what none of them explains is the rest."""
    known = run.training.curves
    whole = known.get("step_ms")
    parts = {name: known[name] for name in PARTS if name in known}
    if whole is None or not parts:
        return None
    values = {name: dict(zip(c.steps, c.means, strict=True)) for name, c in parts.items()}
    shares = {NAMES[name]: [values[name].get(step, 0.0) for step in whole.steps] for name in parts}
    sums = [sum(each) for each in zip(*shares.values(), strict=True)]
    shares["the rest"] = [max(0.0, of - part) for of, part in zip(whole.means, sums, strict=True)]
    lines = [
        Line(name, Curve(whole.steps, means), color, run=run.number)
        for color, (name, means) in enumerate(shares.items())
    ]
    title = f"Where a step's time goes{f': {run.name}' if run.name else ''}"
    return Chart(title, "ms", lines, stacked=True)


def maps(story: Story) -> list[list[Map]]:
    """Return the maps of each Trainer; the one in which a rank costs the most stands first."""
    found = []
    for training in story.trainings:
        steps = training.curves.get("step_ms", Curve())
        whole = curves.median(steps.means)
        each = [map_of(name, known, whole) for name, known in training.maps.items()]
        each.sort(key=lambda pair: -pair[0] if pair[0] >= NOTABLE else 0.0)  # noise has no order
        trainer = training.number if len(story.trainings) > 1 else 0
        if each:
            found.append([replace(one, trainer=trainer) for _, one in each])
    return found


def map_of(name: str, known: curves.RankMap, whole: float) -> tuple[float, Map]:
    """Return a map, and the share of a step that its worst rank costs."""
    unit, what = unit_of(name), NAMES.get(name, name)
    if unit != "ms" or not whole:
        return -1.0, Map(what, unit, known, f"{what} of every rank", 0.0)
    worst = curves.ahead(known)
    rank, more = worst or (0, 0.0)
    if more < NOTABLE * whole:
        said = f"{what}: no rank stands out (less than {NOTABLE:.0%} of a step)"
    else:
        said = f"{what}: rank {rank} needs {more:.3g} ms more than the median, {more / whole:.0%}"
        said += " of a step"
    return more / whole, Map(what, unit, known, said, whole)


def trimmed(curve: Curve) -> Curve:
    """Leave out the range where every point is one step: it would repeat the line."""
    if curve.lows == curve.means == curve.highs:
        return replace(curve, lows=[], highs=[])
    return curve
