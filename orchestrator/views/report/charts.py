"""Chooses which metrics share a chart, and in which order the charts stand. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from orchestrator.records.metrics import curves
from orchestrator.records.metrics.curves import Curve
from orchestrator.views.report.story import Machines, Story, Training

# The title, the unit, and the metrics of each chart that every training may have.
KNOWN = (
    ("Loss", "", ("loss", "eval_loss")),
    ("Speed", "/s", ("tokens_per_s",)),
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
    *PARTS,
)
TRAINED, HELD_OUT = "train_", "val_"  # of what the Trainer says at the end of an epoch
NOTABLE = 0.05  # of a step: less is noise
NAMES = {
    "step_ms": "step",
    "data_ms": "waiting for data",
    "forward_backward_ms": "forward and backward",
    "optimizer_ms": "optimizer",
    "exposed_comm_ms": "exposed communication",
    "tokens_per_s": "tokens per second",
    "memory_peak_bytes": "peak memory",
    "memory_bytes": "memory now",
    "mfu": "MFU, against the vendor's peak",
    "mfu_measured": "MFU, against measured peak",
    "loss": "training",
    "eval_loss": "held out",
}


@dataclass(frozen=True)
class Line:
    name: str
    curve: Curve


@dataclass(frozen=True)
class Mark:
    step: int
    bad: bool


@dataclass(frozen=True)
class Chart:
    """One picture: lines over the steps, or areas on top of each other."""

    title: str
    unit: str
    lines: list[Line]
    stacked: bool = False
    marks: tuple[Mark, ...] = ()
    over: str = "steps"  # or "time": seconds since the start


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


def charts(stories: Sequence[Story]) -> list[Chart]:
    """Return the charts of all experiments: the same metric of each in one chart."""
    trainings = [
        (prefix(story, training, len(stories)), training)
        for story in stories
        for training in story.trainings
    ]
    names = dict.fromkeys(name for _, training in trainings for name in training.curves)
    marks = tuple(
        Mark(moment.step, moment.bad)
        for story in stories[:1]
        for moment in story.moments
        if moment.step is not None and len(stories) == 1
    )
    known = {name for _, _, members in KNOWN for name in members} | set(WITHOUT)
    groups = [*KNOWN, *of_a_program(name for name in names if name not in known)]
    found = [
        Chart(title, unit, lines_of(trainings, members), marks=marks)
        for title, unit, members in groups
    ]
    found = [chart for chart in found if chart.lines]
    for each in trainings:
        found += [chart for chart in (split(*each, marks=marks), exposed(*each)) if chart]
    return found


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
    known = [(story, story.machines) for story in stories if story.machines is not None]
    found = []
    for title, unit, name in OF_MACHINES:
        lines = [
            line
            for story, machines in known
            if name in machines.values
            for line in machine_lines(story, machines, name, several=len(stories) > 1)
        ]
        if any(value for line in lines for value in line.curve.means):
            found.append(Chart(title, unit, lines, marks=times(stories), over="time"))
    return found


def machine_lines(story: Story, machines: Machines, name: str, *, several: bool) -> list[Line]:
    if several or len(machines.nodes) > MOST_LINES:
        who = story.experiment.name if several else f"mean of {len(machines.nodes)} nodes"
        return [Line(who, trimmed(machines.middle(name)))]
    names = {node.index: node.name for node in story.record.nodes}
    each = [(names.get(node, f"node {node}"), i) for i, node in enumerate(machines.nodes)]
    lines = [Line(who, machines.line(name, row)) for who, row in each]
    return [line for line in lines if line.curve.means]


def times(stories: Sequence[Story]) -> tuple[Mark, ...]:
    """Return the moments as seconds since the start."""
    if len(stories) > 1:
        return ()
    story = stories[0]
    return tuple(
        Mark(round(moment.time - story.record.started), moment.bad)
        for moment in story.moments
        if moment.time
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


def exposed(before: str, training: Training) -> Chart | None:
    """Return the part of each step in which ranks only wait for communication."""
    whole = training.curves.get("step_ms")
    part = training.curves.get("exposed_comm_ms")
    if whole is None or part is None:
        return None
    lengths = dict(zip(whole.steps, whole.means, strict=True))
    pairs = zip(part.steps, part.means, strict=True)
    known = [(step, value / lengths[step]) for step, value in pairs if lengths.get(step)]
    if not known:
        return None
    curve = Curve([step for step, _ in known], [share for _, share in known])
    whose = " ".join(filter(None, (before, NAMES["exposed_comm_ms"])))
    return Chart("Exposed communication", "ratio", [Line(whose, curve)])


def prefix(story: Story, training: Training, count: int) -> str:
    """Tell a line's experiment and Trainer, where there are several."""
    words = [story.experiment.name] if count > 1 else []
    if len(story.trainings) > 1:
        words.append(f"Trainer {training.number}")
    return " ".join(words)


def lines_of(trainings: Sequence[tuple[str, Training]], members: Sequence[str]) -> list[Line]:
    several = sum(any(name in each.curves for _, each in trainings) for name in members) > 1
    lines = []
    for before, training in trainings:
        for name in members:
            curve = training.curves.get(name)
            if curve is not None:
                label = NAMES.get(name, name) if several or not before else ""
                lines.append(Line(" ".join(filter(None, (before, label))), trimmed(curve)))
    return lines


def split(before: str, training: Training, marks: tuple[Mark, ...] = ()) -> Chart | None:
    """Divide the time of a step into its parts; what none of them explains is the rest."""
    whole = training.curves.get("step_ms")
    parts = {name: training.curves[name] for name in PARTS if name in training.curves}
    if whole is None or not parts:
        return None
    values = {name: dict(zip(c.steps, c.means, strict=True)) for name, c in parts.items()}
    lines = [
        Line(NAMES[name], Curve(whole.steps, [values[name].get(s, 0.0) for s in whole.steps]))
        for name in parts
    ]
    sums = [sum(line.curve.means[i] for line in lines) for i in range(len(whole.steps))]
    rest = [max(0.0, of - known) for of, known in zip(whole.means, sums, strict=True)]
    lines.append(Line("the rest", Curve(whole.steps, rest)))
    title = f"Where a step's time goes{f': {before}' if before else ''}"
    return Chart(title, "ms", lines, stacked=True, marks=marks)


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


def unit_of(name: str) -> str:
    for end, unit in (("_ms", "ms"), ("_bytes", "bytes"), ("_per_s", "/s")):
        if name.endswith(end):
            return unit
    return ""


def trimmed(curve: Curve) -> Curve:
    """Leave out the range where every point is one step: it would repeat the line."""
    if curve.lows == curve.means == curve.highs:
        return replace(curve, lows=[], highs=[])
    return curve
