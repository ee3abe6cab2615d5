"""Chooses the charts: which metrics share one, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.common.text import format_duration
from orchestrator.records.metrics.curves import WORDS, Curve, better_direction, unit_of
from orchestrator.views.report.run_data import ALL_NODES, RunData, TrainingData

# The title, the unit, and the metrics of each chart that every training may have.
KNOWN = (
    ("Loss", "", ("loss", "eval_loss")),
    ("Speed", "/s", ("tokens_per_s",)),
    ("Step time", "ms", ("step_ms",)),
    ("Learning rate", "", ("lr",)),
    ("Norm of the gradients", "", ("grad_norm",)),
    ("Utilization of the device", "ratio", ("mfu", "mfu_measured")),
    ("Memory", "bytes", ("memory_bytes", "memory_peak_bytes")),
    ("Exposed communication", "ms", ("exposed_comm_ms",)),
)
# The charts of the nodes: one for each name, over the time of the job.
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
# The parts of a step, one after the other.
PARTS = ("data_ms", "forward_backward_ms", "optimizer_ms")
WITHOUT = {
    *("tokens", "epoch", "steps", "left_s", "skipped_steps", "lost_steps"),
    *("saved_step", "saved_bytes", "saved_s", *PARTS),
}
# With more nodes than this, their lines cannot be told apart: the mean is drawn.
MOST_LINES = 8
# Color alone tells this many lines of one chart apart; further ones are dashed.
SOLID = 4
# Prefixes of the metrics that the Trainer writes at the end of an epoch.
TRAINED, HELD_OUT = "train_", "val_"
# Significant digits of a number in the page.
DIGITS = 6
NAMES = {**WORDS, "step_ms": "step", "loss": "training", "eval_loss": "held out"}


@dataclass(frozen=True)
class ChartLine:
    """A curve and its look: one color for each run, and one dash for each metric, in all charts."""

    name: str
    curve: Curve
    color: int = 0
    dash: int = 0
    # "least" or "most", if the metric's name says which is better.
    best: str = ""
    # The number of the training whose steps these are, over all experiments.
    run: int | None = None
    # True if a value holds until the next one.
    stair: bool = False
    # True if the points are no curve: each is of another run.
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """One picture: lines over the steps, or areas on top of each other."""

    title: str
    unit: str
    lines: list[ChartLine]
    stacked: bool = False
    # "steps", or "time" for seconds since the start.
    over: str = "steps"


@dataclass(frozen=True)
class ChartRun:
    """One experiment, among all that a page shows."""

    number: int
    # Empty if there is only one.
    name: str
    run_data: RunData
    training: TrainingData


def runs(reports: Sequence[RunData]) -> list[ChartRun]:
    several = len(reports) > 1
    return [
        ChartRun(number, each.experiment.name * several, each, each.training)
        for number, each in enumerate(reports)
    ]


# -- charts ---------------------------------------------------------------------------------------


def metric_charts(reports: Sequence[RunData]) -> list[Chart]:
    """Return the charts of all experiments: the same metric of each in one chart."""
    every = runs(reports)
    names = dict.fromkeys(name for run in every for name in run.training.curves)
    known = WITHOUT.union(*(members for _, _, members in KNOWN))
    groups = [*KNOWN, *of_a_program(name for name in names if name not in known)]
    found = [Chart(title, unit, lines_of(every, members)) for title, unit, members in groups]
    found = [chart for chart in found if chart.lines]
    return found + [chart for run in every if (chart := split(run)) is not None]


def of_a_program(names: Iterable[str]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield a chart for each metric of a program's own.

    An epoch's metric of the training and of the held-out data share a chart, so that overfitting
    shows.
    """
    known = dict.fromkeys(names)
    for name in known:
        of = name.removeprefix(TRAINED)
        if of != name and HELD_OUT + of in known:
            yield f"{of[:1].upper()}{of[1:]} per epoch", unit_of(name), (name, HELD_OUT + of)
        elif not (name.startswith(HELD_OUT) and TRAINED + name.removeprefix(HELD_OUT) in known):
            yield name, unit_of(name), (name,)


def lines_of(every: Sequence[ChartRun], members: Sequence[str]) -> list[ChartLine]:
    """Return a line for each run and metric.

    Several runs differ by color, and their metrics by dash. The metrics of one run differ by color.
    """
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
            lines.append(ChartLine(text, curve, color, dash, better_direction(name), run.number))
    return lines


def split(run: ChartRun) -> Chart | None:
    """Return the chart of a step's time, divided into its parts and an unexplained rest."""
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
        ChartLine(name, Curve(whole.steps, means), color, run=run.number)
        for color, (name, means) in enumerate(shares.items())
    ]
    title = f"Where a step's time goes{f': {run.name}' if run.name else ''}"
    return Chart(title, "ms", lines, stacked=True)


def of_machines(reports: Sequence[RunData]) -> list[Chart]:
    """Return the charts of the nodes: a line for each, or the range of many."""
    found = []
    for title, unit, name in OF_MACHINES:
        lines = [
            line
            for color, run_data in enumerate(reports)
            for line in machine_lines(run_data, name, color if len(reports) > 1 else None)
        ]
        if any(value for line in lines for value in line.curve.means):
            found.append(Chart(title, unit, lines, over="time"))
    return found


def machine_lines(run_data: RunData, name: str, color: int | None) -> list[ChartLine]:
    """Return a line for each node; with a color or for many nodes, one line of their mean."""
    known = {node: curves[name] for node, curves in run_data.machines.items() if name in curves}
    mean = known.pop(ALL_NODES, Curve())
    if color is not None or len(known) > MOST_LINES:
        who = run_data.experiment.name if color is not None else f"mean of {len(known)} nodes"
        return [ChartLine(who, mean, color or 0)] if known else []
    names = {node.index: node.name for node in run_data.record.nodes}
    return [
        ChartLine(names.get(node, f"node {node}"), Curve(of.steps, of.means), at, at // SOLID)
        for at, (node, of) in enumerate(known.items())
    ]


# -- as the script takes it -----------------------------------------------------------------------


def script_data(reports: Sequence[RunData]) -> dict[str, Any]:
    """Return the data of all charts for the script. The page has a place for each chart."""
    of_one = len(reports) == 1
    began = reports[0].record.started
    return {
        "charts": [
            *(chart_data(chart, "Training") for chart in metric_charts(reports)),
            *(chart_data(chart, "Machines") for chart in of_machines(reports)),
        ],
        "marks": [
            {
                "words": moment.words,
                "bad": moment.bad,
                "step": moment.step,
                "seconds": round(moment.time - began) if moment.time else None,
            }
            for moment in (reports[0].moments if of_one else ())
        ],
        "axes": [since_start(run) for run in runs(reports)],
    }


def since_start(run: ChartRun) -> list[list[float]]:
    """Return the steps whose time is known, and those times, which only increase."""
    steps: list[float] = []
    times: list[float] = []
    known = run.training.times
    for step, time in zip(known.steps, known.highs, strict=True):
        value = max(0.0, time - run.run_data.record.started)
        if not times or value > times[-1]:
            steps.append(step)
            times.append(short(value))
    return [steps, times] if len(steps) > 1 else []


def chart_data(chart: Chart, section: str) -> dict[str, Any]:
    return {
        "title": chart.title,
        "section": section,
        "unit": chart.unit,
        "stacked": chart.stacked,
        "over": chart.over,
        "words": in_words(chart),
        "lines": [line_data(line) for line in chart.lines],
    }


def in_words(chart: Chart) -> str:
    """Return a chart as text, for users who cannot see it."""
    said = []
    for line in chart.lines:
        curve, ends = line.curve, (line.curve.steps[0], line.curve.steps[-1])
        timed = chart.over == "time"
        first, last = (f"after {format_duration(at)}" if timed else f"at step {at}" for at in ends)
        said.append(
            f"{line.name or chart.title}: {curve.means[0]:.4g} {first},"
            f" {curve.means[-1]:.4g} {last},"
            f" least {min(curve.means):.4g}, most {max(curve.means):.4g}"
        )
    return f"{chart.title} over the {chart.over}. {'; '.join(said)}"


def line_data(line: ChartLine) -> dict[str, Any]:
    curve, best = line.curve, {}
    if line.best == "least":
        best = {"least": short(min(curve.lows or curve.means))}
    elif line.best:
        best = {"most": short(max(curve.highs or curve.means))}
    data = {"name": line.name, "color": line.color, "dash": line.dash, "run": line.run}
    data |= {
        "stair": line.stair,
        "dots": line.dots,
        "best": best,
        "steps": curve.steps,
        "means": rounded(curve.means),
    }
    # If every point is one step, the range would repeat the line.
    if not curve.lows == curve.means == curve.highs and curve.lows:
        data |= {"lows": rounded(curve.lows), "highs": rounded(curve.highs)}
    return data


def rounded(values: Sequence[float | None]) -> list[float | int | None]:
    return [None if value is None else short(value) for value in values]


def short(value: float) -> float | int:
    """Return a number with few digits, as an int if it is whole."""
    near = float(f"{value:.{DIGITS}g}")
    return int(near) if near.is_integer() and abs(near) < 1 << 53 else near
