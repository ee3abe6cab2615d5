"""Writes the page: one HTML file that needs nothing else, and may run nothing but our own script.

Every word in it may come from a node, a log or a user's program: all of it is escaped, and the
page's policy allows only the script whose digest it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from orchestrator.common.text import duration, size
from orchestrator.head.follow import verdict
from orchestrator.records.metrics.curves import Curve
from orchestrator.views.report import charts as choice
from orchestrator.views.report.charts import Chart, Map
from orchestrator.views.report.story import LARGEST_DIFF, Moment, Story, Training

WEB = Path(__file__).parent / "web"
DIGITS = 6  # of a number in the page
MOST_TRAINERS = 4  # of a program whose figures stand at the top: the last ones
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


def page(stories: Sequence[Story], differences: Differences) -> str:
    """Return the whole page; with several experiments it compares them."""
    drawn, data = pictures(stories)
    script = f"{read('uplot.js')}\n{read('page.js')}"
    style = f"{read('uplot.css')}\n{read('page.css')}"
    policy = f"default-src 'none'; script-src {digest(script)}; style-src {digest(style)}"
    title = ", ".join(story.experiment.name for story in stories)
    body = "\n".join(
        [
            *(part for story in stories for part in heading(story)),
            drawn,
            *compared(stories, differences),
            *(part for story in stories for part in details(story, several=len(stories) > 1)),
            *(part for story in stories for part in last_lines(story, several=len(stories) > 1)),
        ]
    )
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{style}</style>
<body>
<main>
{body}
</main>
<script type="application/json" id="data">{embedded(data)}</script>
<script>{script}</script>
</body>
</html>
"""


def read(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    """Name an inline script or style as a Content-Security-Policy does."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# -- the first screen -----------------------------------------------------------------------------


def heading(story: Story) -> Iterator[str]:
    record = story.record
    look = {"done": "good", "failed": "bad", "lost": "bad"}.get(record.state, "")
    lasted = max(0.0, (record.ended or time.time()) - record.started)  # clocks differ
    yield f"<header><h1>{escape(story.experiment.name)}</h1>"
    yield (
        f'<p><span class="state {look}">{escape(record.state)}</span>'
        f" after {duration(lasted)}"
        f' <span class="soft">{escape(clock(record.started))}</span></p>'
    )
    if record.verdict and record.state != "stopped":
        lines = verdict.to_lines(record.verdict)
        yield f'<p class="cause">{"<br>".join(map(escape, lines))}</p>'
    yield f'<dl class="figures">{"".join(figures(story))}</dl></header>'


def figures(story: Story) -> Iterator[str]:
    """Yield the few numbers that people look for first."""
    record = story.record
    ranks = sum(node.nproc for node in record.nodes)
    named = [("nodes x ranks", f"{len(record.nodes)} x {ranks // max(1, len(record.nodes))}")]
    if len({node.nproc for node in record.nodes}) > 1:
        named = [("nodes, ranks", f"{len(record.nodes)}, {ranks}")]
    for training in story.trainings[-MOST_TRAINERS:]:
        whose = f" (Trainer {training.number})" if len(story.trainings) > 1 else ""
        named += ((f"{name}{whose}", value) for name, value in of_training(training))
    for name, value in named:
        yield f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"


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
        yield "tokens per second", f"{middle(known['tokens_per_s']):,.0f}"
    if "step_ms" in known:
        yield "step, median", duration(middle(known["step_ms"]) / 1e3)
    for name in ("mfu", "mfu_measured"):
        if name in known:
            yield choice.NAMES[name], f"{middle(known[name]):.1%}"
            break
    if "memory_peak_bytes" in known:
        yield "peak memory", size(max(known["memory_peak_bytes"].highs))


def middle(curve: Curve) -> float:
    return sorted(curve.means)[len(curve.means) // 2]


def clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))


# -- what is drawn --------------------------------------------------------------------------------


Maps = Sequence[tuple[Story, list[Map]]]


def pictures(stories: Sequence[Story]) -> tuple[str, dict[str, Any]]:
    """Return the places of all charts and maps, and what the script draws there.

    All that changes with each step is in the latter: an open page keeps its places, and its zoom.
    """
    charts, machines = choice.charts(stories), choice.of_machines(stories)
    maps = [(story, each) for story in stories for each in choice.maps(story)]
    machine_maps = [(story, each) for story in stories if (each := choice.machine_maps(story))]
    places = drawn(charts, maps, machines, machine_maps, several=len(stories) > 1)
    return "\n".join(places), drawing([*charts, *machines], [*maps, *machine_maps])


def drawn(
    charts: Sequence[Chart],
    maps: Maps,
    machines: Sequence[Chart],
    machine_maps: Maps,
    *,
    several: bool,
) -> Iterator[str]:
    """Yield the places of all charts: of the training over its steps, of machines over the time."""
    if not charts and not machines:
        yield '<p class="soft">There are no metrics of this job: nothing to draw.</p>'
    if charts:
        yield from section("Training", charts, maps, (0, 0), several=several)
    if machines:
        at = len(charts), len(maps)
        yield from section("Machines", machines, machine_maps, at, several=several)


def section(
    title: str, charts: Sequence[Chart], maps: Maps, at: tuple[int, int], *, several: bool
) -> Iterator[str]:
    """Yield one section; its charts and maps are numbered from `at` on."""
    yield f'<section aria-label="{title}"><h2>{title}</h2><div class="charts">'
    for number, chart in enumerate(charts, at[0]):
        wide = ' class="wide"' if chart.stacked else ""
        yield (
            f"<figure{wide}><figcaption>{escape(chart.title)}</figcaption>"
            f'<div class="plot" id="chart-{number}" role="img"></div></figure>'
        )
    for number, (story, each) in enumerate(maps, at[1]):
        options = "".join(f"<option>{escape(one.name)}</option>" for one in each)
        whose = f" of {story.experiment.name}" if several else ""
        if each[0].trainer:
            whose += f", Trainer {each[0].trainer}"
        yield (
            f'<figure class="wide"><figcaption><label>Every {each[0].whose}{escape(whose)}:'
            f' <select id="which-{number}">{options}</select></label></figcaption>'
            f'<canvas class="map" id="map-{number}" role="img"></canvas>'
            f'<p id="words-{number}" aria-live="polite"></p></figure>'
        )
    yield "</div></section>"


def in_words(chart: Chart) -> str:
    """Describe a chart to those who do not see it."""
    said = []
    for line in chart.lines:
        curve = line.curve
        first, last = (
            f"after {duration(at)}" if chart.over == "time" else f"at step {at}"
            for at in (curve.steps[0], curve.steps[-1])
        )
        said.append(
            f"{line.name or chart.title}: {curve.means[0]:.4g} {first},"
            f" {curve.means[-1]:.4g} {last},"
            f" least {min(curve.means):.4g}, most {max(curve.means):.4g}"
        )
    return f"{chart.title} over the {chart.over}. {'; '.join(said)}"


def embedded(data: Mapping[str, Any]) -> str:
    """Return what the script draws, as JSON that cannot end the element it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def drawing(charts: Sequence[Chart], maps: Sequence[tuple[Story, list[Map]]]) -> dict[str, Any]:
    """Return what the script draws."""
    return {
        "charts": [
            {
                "unit": chart.unit,
                "stacked": chart.stacked,
                "over": chart.over,
                "words": in_words(chart),
                "moments": [{"step": mark.step, "bad": mark.bad} for mark in chart.marks],
                "lines": [line_data(line.name, line.curve) for line in chart.lines],
            }
            for chart in charts
        ],
        "maps": [[map_data(one) for one in each] for _, each in maps],
    }


def line_data(name: str, curve: Curve) -> dict[str, Any]:
    ranges = {"lows": rounded(curve.lows), "highs": rounded(curve.highs)} if curve.lows else {}
    return {"name": name, "steps": curve.steps, "means": rounded(curve.means), **ranges}


def map_data(one: Map) -> dict[str, Any]:
    rows = [rounded(row, 4) for row in one.map.rows]
    return {
        "unit": one.unit,
        "summary": one.summary,
        "whose": one.whose,
        "scale": one.scale,
        "steps": one.map.steps,
        "ranks": one.map.ranks,
        "rows": rows,
    }


def rounded(values: Sequence[float | None], digits: int = DIGITS) -> list[float | int | None]:
    return [None if value is None else short(value, digits) for value in values]


def short(value: float, digits: int) -> float | int:
    """Write a number with few digits, and without a point where it is whole."""
    near = float(f"{value:.{digits}g}")
    return int(near) if near.is_integer() and abs(near) < 1 << 53 else near


# -- what differs ---------------------------------------------------------------------------------


def compared(stories: Sequence[Story], differences: Differences) -> Iterator[str]:
    if len(stories) < 2:
        return
    names = "".join(f"<th>{escape(story.experiment.name)}</th>" for story in stories)
    yield f'<section><h2>What differs</h2><div class="scroll"><table><tr><th></th>{names}</tr>'
    for section, keys in differences.items():
        for key, values in keys.items():
            cells = "".join(f"<td>{escape(written(value))}</td>" for value in values)
            yield f"<tr><th>{escape(section)}: {escape(key)}</th>{cells}</tr>"
    yield "</table></div></section>"


def written(value: Any) -> str:
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:300]}..."


# -- the rest -------------------------------------------------------------------------------------


def details(story: Story, *, several: bool) -> Iterator[str]:
    whose = f" of {escape(story.experiment.name)}" if several else ""
    yield f"<section><h2>What happened{whose}</h2>{time_axis(story)}<ol>"
    for moment in story.moments:
        after = since(moment.time - story.record.started) if moment.time else ""
        step = "" if moment.step is None else f"step {moment.step}"
        at = f" ({step})" if step not in moment.what else ""
        look = ' class="bad"' if moment.bad else ""
        yield f'<li{look}><span class="soft">{after}</span> {escape(moment.what)}{at}</li>'
    yield f"</ol></section><section><h2>Nodes{whose}</h2>{node_table(story)}</section>"
    yield f"<section><h2>What was run{whose}</h2>{what_was_run(story)}</section>"


def since(seconds: float) -> str:
    """Write when something happened after the start, or before it."""
    if abs(seconds) < 59.95:
        return f"{seconds:+.1f} s"
    return f"{'-' if seconds < 0 else '+'}{duration(abs(seconds))}"


def last_lines(story: Story, *, several: bool) -> Iterator[str]:
    whose = f" of {escape(story.experiment.name)}" if several else ""
    yield f"<section><h2>Last lines of the logs{whose}</h2>"
    for name, lines in story.logs:
        text = escape("\n".join(lines)) or "nothing was printed"
        yield f"<details><summary>{escape(name)}</summary><pre>{text}</pre></details>"
    yield "</section>"


def time_axis(story: Story) -> str:
    """Draw the moments on one line, as long as the job was."""
    timed = [moment for moment in story.moments if moment.time]
    if len(timed) < 2:
        return ""
    first, last = timed[0].time, timed[-1].time
    scale = 1000 / max(last - first, 1e-3)

    def mark(moment: Moment) -> str:
        x = (moment.time - first) * scale
        look = ' class="bad"' if moment.bad else ""
        return (
            f'<line{look} x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="40">'
            f"<title>{escape(moment.what)}</title></line>"
        )

    return (
        '<svg class="time" viewBox="-4 0 1008 48" preserveAspectRatio="none" aria-hidden="true">'
        '<line class="axis" x1="0" x2="1000" y1="24" y2="24"/>'
        f"{''.join(map(mark, timed))}</svg>"
    )


def node_table(story: Story) -> str:
    facts = {}
    for node in sequence(story.manifest.get("nodes")):
        if isinstance(node, dict) and isinstance(node.get("facts"), dict):
            facts[str(node.get("name"))] = node["facts"]
    names = [name for name in FACTS if any(each.get(name) is not None for each in facts.values())]
    head = "".join(f"<th>{FACTS[name]}</th>" for name in names)
    rows = []
    for node in story.record.nodes:
        known = facts.get(node.name, {})
        cells = "".join(f"<td>{escape(fact(name, known.get(name)))}</td>" for name in names)
        ranks = f"{node.first_rank} to {node.first_rank + node.nproc - 1}"
        ranks = ranks if node.nproc > 1 else str(node.first_rank)
        code = "-" if node.exit_code is None else str(node.exit_code)
        rows.append(
            f'<tr><td class="number">{node.index}</td><td>{escape(node.name)}</td>'
            f"<td>{ranks}</td><td>{escape(node.state)}</td><td>{code}</td>{cells}</tr>"
        )
    own = "<th>node</th><th>name</th><th>ranks</th><th>state</th><th>exit code</th>"
    return f'<div class="scroll"><table><tr>{own}{head}</tr>{"".join(rows)}</table></div>'


def fact(name: str, value: Any) -> str:
    if name == "memory_kb" and isinstance(value, int):
        return size(value * 1024)
    return written(value)


def what_was_run(story: Story) -> str:
    data = story.manifest
    code = data.get("code") if isinstance(data.get("code"), dict) else {}
    assert isinstance(code, dict)
    rows = [
        ("command", shlex.join(story.record.command[1:])),
        ("directory", data.get("directory")),
        ("revision", code.get("commit")),
        ("branch", code.get("branch")),
        ("orchestrator", data.get("orchestrator")),
    ]
    cells = "".join(
        f"<tr><th>{name}</th><td>{escape(written(value))}</td></tr>"
        for name, value in rows
        if value
    )
    parts = [f'<div class="scroll"><table>{cells}</table></div>']
    folded = [
        ("Edits since that revision", str(code.get("diff") or "")[:LARGEST_DIFF]),
        ("Config", story.config),
        ("Environment of the ranks on node 0", environment(data)),
    ]
    for title, text in folded:
        if text:
            parts.append(f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>")
    return "".join(parts)


def environment(data: Mapping[str, Any]) -> str:
    for node in sequence(data.get("nodes")):
        if isinstance(node, dict) and isinstance(node.get("environment"), dict):
            return "\n".join(f"{name}={value}" for name, value in node["environment"].items())
    return ""


def sequence(data: Any) -> list[Any]:
    return data if isinstance(data, list) else []
