"""Writes the page: one HTML file that needs nothing else, and may run nothing but our own script.

The HTML is in web/. Every word in it may come from a node, a log or a user's program: the templates
escape all of it, and the page's policy allows only the script whose digest it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.common.text import duration, size
from orchestrator.head.follow import verdict
from orchestrator.head.status import settings
from orchestrator.records import goodput
from orchestrator.records.experiment import JobRecord
from orchestrator.records.metrics.curves import Curve, RankMap, median
from orchestrator.records.outcome import Verdict
from orchestrator.views.report import charts as choice
from orchestrator.views.report import members as of_sweep
from orchestrator.views.report import scaling
from orchestrator.views.report.charts import Axis, Chart, Line, Map, Mark
from orchestrator.views.report.members import Members
from orchestrator.views.report.scaling import Against, Size
from orchestrator.views.report.story import LARGEST_DIFF, Moment, Story, Training
from orchestrator.views.templates import templates_in

WEB = Path(__file__).parent / "web"
AT = {"steps": "step", "ranks": "ranks"}  # what a number on a chart's axis is
DIGITS = 6  # of a number in the page
MOST_TRAINERS = 4  # of a program whose figures stand at the top: the last ones
LONGEST_VALUE_CHARACTERS = 300
# Of a node's facts: the key, and the heading of its column.
FACTS = {
    "hostname": "host name",
    "cpus": "CPUs",
    "memory_kb": "memory",
    "gpus": "GPUs",
    "torch": "torch",
    "python_version": "Python",
    "kernel": "kernel",
}

Differences = Mapping[str, Mapping[str, Sequence[Any]]]  # section -> key -> a value for each


def page(stories: Sequence[Story], differences: Differences, sizes: Sequence[Size] = ()) -> str:
    """Return the whole page; with several experiments it compares them, also by their sizes."""
    drawn = pictures(stories, sizes)
    return filled("report.html", stories=stories, differences=differences, pictures=drawn)


def page_of_members(members: Members) -> str:
    """Return the page that compares the members of a sweep."""
    drawn = Pictures(of_sweep.over_time(members))
    return filled("sweep.html", members=members, pictures=drawn)


def filled(name: str, **parts: Any) -> str:
    """Fill a page, with the script that draws and its style."""
    return TEMPLATES.get_template(name).render(
        **parts,
        script=f"{read('uplot.js')}\n{read('page.js')}",
        style=f"{read('uplot.css')}\n{read('page.css')}",
    )


def read(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    """Name an inline script or style as a Content-Security-Policy does."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# -- the first screen -----------------------------------------------------------------------------


def cause(story: Story) -> Verdict | None:
    """Return why a job failed; a stop that somebody asked for is no failure."""
    return None if story.record.state == "stopped" else story.record.verdict


def lasted(record: JobRecord) -> str:
    seconds = max(0.0, (record.ended or time.time()) - record.started)  # clocks differ
    return f"{'after' if record.over else 'for'} {duration(seconds)}"


def figures(story: Story) -> Iterator[tuple[str, str]]:
    """Yield the few numbers that people look for first."""
    record = story.record
    ranks = sum(node.nproc for node in record.nodes)
    if len({node.nproc for node in record.nodes}) > 1:
        yield "nodes, ranks", f"{len(record.nodes)}, {ranks}"
    else:
        yield "nodes x ranks", f"{len(record.nodes)} x {ranks // max(1, len(record.nodes))}"
    for training in story.trainings[-MOST_TRAINERS:]:
        whose = f" (Trainer {training.number})" if len(story.trainings) > 1 else ""
        for name, value in of_training(training):
            yield f"{name}{whose}", value


def of_training(training: Training) -> Iterator[tuple[str, str]]:
    known = training.curves
    if known:
        yield "steps", str(max(curve.steps[-1] for curve in known.values()))
    if training.lost:
        yield "last loss", "NaN or inf"
    elif "loss" in known:
        yield "last loss", f"{known['loss'].means[-1]:.4g}"
    if "eval_loss" in known:
        yield "least held-out loss", f"{min(known['eval_loss'].means):.4g}"
    if "tokens_per_s" in known:
        yield f"{training.unit} per second", f"{middle(known['tokens_per_s']):,.0f}"
    if "step_ms" in known:
        yield "step, median", duration(middle(known["step_ms"]) / 1e3)
    for name in ("mfu", "mfu_measured"):
        if name in known:
            yield choice.NAMES[name], f"{middle(known[name]):.1%}"
            break
    if "memory_peak_bytes" in known:
        yield "peak memory", size(max(known["memory_peak_bytes"].highs))


MOST_MAP_ROWS = 512  # of a map: more are less than a pixel each
MOST_KEYS = 8  # settings that differ between runs and have a column


def runs(stories: Sequence[Story]) -> tuple[list[str], list[tuple[int, Story, list[str]]]]:
    """Return the table of several experiments: its headings, and for each its color and cells."""
    known = [dict(figures(story)) for story in stories]
    names = list(dict.fromkeys(name for each in known for name in each))
    every = [settings.of(story.experiment, story.record) for story in stories]
    keys = settings.differing(every, MOST_KEYS)
    rows = []
    for number, (color, story) in enumerate(zip(choice.colors(stories), stories, strict=True)):
        cells = [known[number].get(name, "-") for name in names]
        cells += [every[number].get(key, "-") for key in keys]
        rows.append((color, story, cells))
    return [*names, *keys], rows


def middle(curve: Curve) -> float:
    return sorted(curve.means)[len(curve.means) // 2]


def clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))


# -- what is drawn --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pictures:
    """All charts and maps: of the training over its steps, of machines over the time.

    The page has a place for each of them. What changes with each step is in the JSON: an open page
    keeps its places, and its zoom.
    """

    charts: Sequence[Chart]
    maps: Sequence[tuple[Story, Sequence[Map]]] = ()
    machines: Sequence[Chart] = ()
    machine_maps: Sequence[tuple[Story, Sequence[Map]]] = ()
    marks: Sequence[Mark] = ()
    axes: Sequence[Mapping[str, Axis]] = ()
    attempts: Sequence[tuple[int, int]] = ()  # when each began and ended, in seconds of the job
    scaling: Sequence[Chart] = ()
    sizes: Sequence[Against] = ()

    def to_json(self) -> dict[str, Any]:
        """Return what the script draws."""
        return {
            "charts": [
                chart_data(chart) for chart in (*self.charts, *self.machines, *self.scaling)
            ],
            "maps": [
                [map_data(one) for one in choices]
                for _, choices in (*self.maps, *self.machine_maps)
            ],
            "marks": [
                {name: value for name, value in vars(mark).items() if value not in (None, False)}
                for mark in self.marks
            ],
            "axes": [
                {name: [axis.steps, rounded(axis.values)] for name, axis in each.items()}
                for each in self.axes
            ],
            "attempts": self.attempts,
        }


def pictures(stories: Sequence[Story], sizes: Sequence[Size] = ()) -> Pictures:
    return Pictures(
        choice.charts(stories),
        [(story, maps) for story in stories for maps in choice.maps(story)],
        choice.of_machines(stories),
        [(story, maps) for story in stories if (maps := choice.machine_maps(story))],
        choice.marks(stories),
        choice.axes(stories),
        attempts(stories[0].record) if len(stories) == 1 else [],
        [scaling.chart(sizes)] if sizes else [],
        list(scaling.against_smallest(sizes)) if sizes else [],
    )


def attempts(record: JobRecord) -> list[tuple[int, int]]:
    """Return when each attempt of a job that was started again began and ended."""
    spans = goodput.spans_of(record, time.time())
    began = record.started
    every = [(round(span.started - began), round(span.ended - began)) for span in spans]
    return every if len(every) > 1 else []


def in_words(chart: Chart) -> str:
    """Describe a chart to those who do not see it."""
    said = []
    for line in chart.lines:
        curve = line.curve
        first, last = (
            f"after {duration(at)}" if chart.over == "time" else f"at {AT[chart.over]} {at}"
            for at in (curve.steps[0], curve.steps[-1])
        )
        said.append(
            f"{line.name or chart.title}: {curve.means[0]:.4g} {first},"
            f" {curve.means[-1]:.4g} {last},"
            f" least {min(curve.means):.4g}, most {max(curve.means):.4g}"
        )
    return f"{chart.title} over the {chart.over}. {'; '.join(said)}"


def chart_data(chart: Chart) -> dict[str, Any]:
    return {
        "unit": chart.unit,
        "stacked": chart.stacked,
        "over": chart.over,
        "words": in_words(chart),
        "lines": [line_data(line) for line in chart.lines],
    }


def line_data(line: Line) -> dict[str, Any]:
    curve = line.curve
    ranges = {"lows": rounded(curve.lows), "highs": rounded(curve.highs)} if curve.lows else {}
    best = {
        line.best: min(curve.lows or curve.means)
        if line.best == "least"
        else max(curve.highs or curve.means)
    }
    return {
        "name": line.name,
        "color": line.color,
        "dash": line.dash,
        "run": line.run,
        "best": {name: short(value, DIGITS) for name, value in best.items() if name},
        "steps": curve.steps,
        "means": rounded(curve.means),
        **ranges,
    }


def map_data(one: Map) -> dict[str, Any]:
    ranks, rows = grouped(one.map)
    return {
        "unit": one.unit,
        "summary": one.summary,
        "whose": one.whose,
        "scale": one.scale,
        "steps": one.map.steps,
        "ranks": ranks,
        "rows": [rounded(row, 4) for row in rows],
    }


def grouped(known: RankMap) -> tuple[Sequence[int | str], Sequence[Sequence[float | None]]]:
    """Return a map's ranks and their rows: of very many, the one of some that is the furthest off.

    At each step that is the one whose value is the furthest from the median of all ranks.
    """
    size = -(-len(known.ranks) // MOST_MAP_ROWS)
    if size <= 1:
        return known.ranks, known.rows
    columns = list(zip(*known.rows, strict=True))
    middles = [median([value for value in column if value is not None]) for column in columns]
    names: list[int | str] = []
    rows = []
    for at in range(0, len(known.ranks), size):
        part = known.ranks[at : at + size]
        names.append(f"{part[0]}-{part[-1]}" if len(part) > 1 else part[0])
        pairs = zip(columns, middles, strict=True)
        rows.append([furthest(column[at : at + size], middle) for column, middle in pairs])
    return names, rows


def furthest(values: Sequence[float | None], middle: float) -> float | None:
    known = [value for value in values if value is not None]
    return max(known, key=lambda value: abs(value - middle), default=None)


def rounded(values: Sequence[float | None], digits: int = DIGITS) -> list[float | int | None]:
    return [None if value is None else short(value, digits) for value in values]


def short(value: float, digits: int) -> float | int:
    """Write a number with few digits, and without a point where it is whole."""
    near = float(f"{value:.{digits}g}")
    return int(near) if near.is_integer() and abs(near) < 1 << 53 else near


# -- the rest -------------------------------------------------------------------------------------


def written(value: Any) -> str:
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return (
        text if len(text) <= LONGEST_VALUE_CHARACTERS else f"{text[:LONGEST_VALUE_CHARACTERS]}..."
    )


def since(seconds: float) -> str:
    """Write when something happened after the start, or before it."""
    if abs(seconds) < 59.95:
        return f"{seconds:+.1f} s"
    return f"{'-' if seconds < 0 else '+'}{duration(abs(seconds))}"


def marks(story: Story) -> list[tuple[float, Moment]]:
    """Place the moments on a line of 1000 that is as long as the job was."""
    timed = [moment for moment in story.moments if moment.time]
    if not timed:
        return []
    first, last = timed[0].time, timed[-1].time
    scale = 1000 / max(last - first, 1e-3)
    return [(round((moment.time - first) * scale, 1), moment) for moment in timed]


def nodes(story: Story) -> tuple[list[str], list[list[Any]]]:
    """Return the headings and the rows of the table of nodes."""
    known = {str(node.get("name")): node["facts"] for node in with_key(story, "facts")}
    names = [name for name in FACTS if any(facts.get(name) is not None for facts in known.values())]
    rows = []
    for node in story.record.nodes:
        facts = known.get(node.name, {})
        last = node.first_rank + node.nproc - 1
        ranks = f"{node.first_rank} to {last}" if node.nproc > 1 else node.first_rank
        code = "-" if node.exit_code is None else node.exit_code
        state = node.state
        if (found := cause(story)) and found.node == node.index:
            state += " (the cause)" if found.rank is None else f" (rank {found.rank} was the cause)"
        cells = [fact(name, facts.get(name)) for name in names]
        rows.append([node.index, node.name, ranks, state, code, *cells])
    headings = ["node", "name", "ranks", "state", "exit code"]
    return [*headings, *(FACTS[name] for name in names)], rows


def with_key(story: Story, key: str) -> list[dict[str, Any]]:
    """Return the manifest's nodes that have a mapping of that name; nobody has checked them."""
    listed = story.manifest.get("nodes")
    return [
        node
        for node in (listed if isinstance(listed, list) else [])
        if isinstance(node, dict) and isinstance(node.get(key), dict)
    ]


def fact(name: str, value: Any) -> str:
    if name == "memory_kb" and isinstance(value, int):
        return size(value * 1024)
    return written(value)


def what_was_run(story: Story) -> tuple[list[tuple[str, Any]], list[tuple[str, str]]]:
    """Return what stands in the table, and the long texts that are folded below it."""
    data = story.manifest
    code = data["code"] if isinstance(data.get("code"), dict) else {}
    environment: dict[str, Any] = next(
        (node["environment"] for node in with_key(story, "environment")), {}
    )
    rows = [
        ("command", shlex.join(story.record.command[1:])),
        ("directory", data.get("directory")),
        ("revision", code.get("commit")),
        ("branch", code.get("branch")),
        ("orchestrator", data.get("orchestrator")),
    ]
    folded = [
        ("Edits since that revision", str(code.get("diff") or "")[:LARGEST_DIFF]),
        ("Config", story.config),
        (
            "Environment of the ranks on node 0",
            "\n".join(f"{name}={value}" for name, value in environment.items()),
        ),
    ]
    return rows, folded


TEMPLATES = templates_in(WEB)
TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
TEMPLATES.globals["looks"] = {"done": "good", "failed": "bad", "lost": "bad"}
TEMPLATES.filters["verdict"] = verdict.to_lines
for function in (
    digest,
    cause,
    lasted,
    figures,
    runs,
    clock,
    written,
    since,
    marks,
    nodes,
    what_was_run,
    of_sweep.coordinates,
    of_sweep.summary,
):
    TEMPLATES.filters[function.__name__] = function
TEMPLATES.filters["members_table"] = of_sweep.table


def part(name: str, *arguments: Any) -> str:
    """Return the HTML of a part of the page, escaped."""
    return str(getattr(TEMPLATES.get_template("parts.html").module, name)(*arguments))
