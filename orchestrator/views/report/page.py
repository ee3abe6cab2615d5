"""Fills the pages: of the report as one self-contained file, and of the dashboard.

The HTML is in web/. Every word in it may come from a node, a log or a user's program: the templates
escape all of it, and the policy of a page allows only our own script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from orchestrator.common.text import format_bytes, format_duration
from orchestrator.head.follow import verdict
from orchestrator.head.screen import styles
from orchestrator.head.screen.output import Table
from orchestrator.head.status.row import command_of
from orchestrator.records.experiment import JobRecord
from orchestrator.records.metrics.curves import count_in_thousands
from orchestrator.records.outcome import JobVerdict
from orchestrator.views.report import charts
from orchestrator.views.report.members import Members
from orchestrator.views.report.run_data import RunData, TrainingData

WEB = Path(__file__).parent / "web"
# The limit of columns for settings that differ between runs.
MOST_KEYS = 8
# Settings of how the job runs, not of the training.
APART = ("launch", "nodes", "command", "start")
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

# From section and key to one value for each experiment.
Differences = Mapping[str, Mapping[str, Sequence[Any]]]


def report_page(reports: Sequence[RunData], differences: Differences, **live: Any) -> str:
    """Return the page of experiments; with several, a comparison."""
    drawn = charts.script_data(reports)
    return fill_template(
        "report.html", reports=reports, differences=differences, pictures=drawn, **live
    )


def page_of_members(members: Members, **live: Any) -> str:
    """Return the page that compares the members of a sweep."""
    known = filter(None, (members.curves(), members.best_so_far()))
    drawn = [charts.chart_data(chart, "Training") for chart in known]
    return fill_template(
        "sweep.html", members=members, pictures={**NOTHING, "charts": drawn}, **live
    )


@dataclass(frozen=True)
class PageTable:
    """A table of the terminal as a part of a page; `link` is the address behind a row's name."""

    title: str
    table: Table[Any]
    rows: Sequence[Any]
    # The words that stand for a table without rows.
    empty: str
    link: Callable[[Any], str] = lambda _: ""

    def cells(self, row: Any) -> list[tuple[str, str]]:
        """Return the text of each cell, and its class in the page."""
        pairs = [(cell, "") if isinstance(cell, str) else cell for cell in self.table.cells(row)]
        return [(text, CLASSES.get(style, "")) for text, style in pairs]


CLASSES = {styles.FAILED: "bad", styles.WARNING: "warn", styles.DONE: "good", styles.DIM: "soft"}


NOTHING: dict[str, list[Any]] = {"charts": [], "marks": [], "axes": []}


def fill_template(name: str, *, pictures: Mapping[str, Any] = NOTHING, **parts: Any) -> str:
    """Return a filled template; a page that is a file includes its script and style."""
    return TEMPLATES.get_template(name).render(
        pictures=pictures,
        script=f"{read('uplot.js')}\n{read('page.js')}",
        style=f"{read('uplot.css')}\n{read('page.css')}",
        **{"live": False, "here": "", "sweeps": (), **parts},
    )


def read(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


def content_hash(text: str) -> str:
    """Return the hash of an inline script or style for a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# -- the first screen -----------------------------------------------------------------------------


def cause(run_data: RunData) -> JobVerdict | None:
    """Return the verdict on a failed job; a stop that its user requested is no failure."""
    return None if run_data.record.state == "stopped" else run_data.record.verdict


def lasted(record: JobRecord) -> str:
    # The clocks of the nodes may differ.
    seconds = max(0.0, (record.ended or time.time()) - record.started)
    return f"{'after' if record.over else 'for'} {format_duration(seconds)}"


def figures(run_data: RunData) -> Iterator[tuple[str, str]]:
    """Yield the few numbers that users look for first."""
    record = run_data.record
    ranks = sum(node.nproc for node in record.nodes)
    if len({node.nproc for node in record.nodes}) > 1:
        yield "nodes, ranks", f"{len(record.nodes)}, {ranks}"
    else:
        yield "nodes x ranks", f"{len(record.nodes)} x {ranks // max(1, len(record.nodes))}"
    yield from of_training(run_data.training)


def of_training(training: TrainingData) -> Iterator[tuple[str, str]]:
    known = training.curves
    if known:
        yield "steps", str(max(curve.steps[-1] for curve in known.values()))
    if training.lost:
        yield "last loss", "NaN or inf"
    elif "loss" in known:
        yield "last loss", f"{known['loss'].means[-1]:.4g}"
    if "eval_loss" in known:
        yield "least held-out loss", f"{min(known['eval_loss'].means):.4g}"
    if speed := median(training, "tokens_per_s"):
        yield f"{training.unit} per second", f"{speed:,.0f}"
    if "step_ms" in known:
        yield "step, median", format_duration(median(training, "step_ms") / 1e3)
    for name in ("mfu", "mfu_measured"):
        if name in known:
            yield charts.NAMES[name], f"{median(training, name):.1%}"
            break
    if "memory_peak_bytes" in known:
        yield "peak memory", format_bytes(max(known["memory_peak_bytes"].highs))


def median(training: TrainingData, name: str) -> float:
    curve = training.curves.get(name)
    return statistics.median_low(curve.means) if curve else 0.0


def runs_table(
    reports: Sequence[RunData], differences: Differences
) -> tuple[list[str], list[tuple[int, RunData, list[str]]]]:
    """Return the table of several experiments: its headings, and for each its color and cells."""
    known = [{**dict(figures(run_data)), **speed_of_a_rank(run_data)} for run_data in reports]
    names = list(dict.fromkeys(name for each in known for name in each))
    found = {**differences.get("config", {}), **differences.get("command", {})}
    keys = [key for key in found if key.partition(".")[0] not in APART][:MOST_KEYS]
    rows = []
    for number, run_data in enumerate(reports):
        cells = [known[number].get(name, "-") for name in names]
        cells += [written(found[key][number]) for key in keys]
        rows.append((number, run_data, cells))
    return [*names, *(key.removeprefix("option ") for key in keys)], rows


def speed_of_a_rank(run_data: RunData) -> dict[str, str]:
    """Return the speed per rank, by which runs of different sizes are compared."""
    speed = median(run_data.training, "tokens_per_s")
    ranks = sum(node.nproc for node in run_data.record.nodes)
    return {"per second and rank": count_in_thousands(speed / ranks)} if speed and ranks else {}


def clock_text(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))


# -- the rest -------------------------------------------------------------------------------------


def written(value: Any) -> str:
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    cut = LONGEST_VALUE_CHARACTERS
    return text if len(text) <= cut else f"{text[:cut]}..."


def since(seconds: float) -> str:
    """Return a time relative to the start."""
    if abs(seconds) < 59.95:
        return f"{seconds:+.1f} s"
    return f"{'-' if seconds < 0 else '+'}{format_duration(abs(seconds))}"


def nodes(run_data: RunData) -> tuple[list[str], list[list[Any]]]:
    """Return the headings and the rows of the table of nodes."""
    known = {str(node.get("name")): node["facts"] for node in with_key(run_data, "facts")}
    names = [name for name in FACTS if any(facts.get(name) is not None for facts in known.values())]
    rows = []
    for node in run_data.record.nodes:
        facts = known.get(node.name, {})
        last = node.first_rank + node.nproc - 1
        ranks = f"{node.first_rank} to {last}" if node.nproc > 1 else node.first_rank
        state = node.state
        if (found := cause(run_data)) and found.node == node.index:
            state += " (the cause)" if found.rank is None else f" (rank {found.rank} was the cause)"
        cells = [fact(name, facts.get(name)) for name in names]
        rows.append([node.index, node.name, ranks, state, written(node.exit_code), *cells])
    headings = ["node", "name", "ranks", "state", "exit code"]
    return [*headings, *(FACTS[name] for name in names)], rows


def with_key(run_data: RunData, key: str) -> list[dict[str, Any]]:
    """Return the manifest's nodes that have a mapping of that name; its values are not checked."""
    listed = run_data.manifest.get("nodes")
    return [
        node
        for node in (listed if isinstance(listed, list) else [])
        if isinstance(node, dict) and isinstance(node.get(key), dict)
    ]


def fact(name: str, value: Any) -> str:
    if name == "memory_kb" and isinstance(value, int):
        return format_bytes(value * 1024)
    return written(value)


def what_was_run(run_data: RunData) -> tuple[list[tuple[str, Any]], list[tuple[str, str]]]:
    """Return the rows of the table, and the long texts that are folded below it."""
    data = run_data.manifest
    code = data["code"] if isinstance(data.get("code"), dict) else {}
    environments = [node["environment"] for node in with_key(run_data, "environment")]
    variables = [f"{name}={value}" for name, value in (environments or [{}])[0].items()]
    rows = [
        ("command", shlex.join(run_data.record.command[1:])),
        ("directory", data.get("directory")),
        ("revision", code.get("commit")),
        ("branch", code.get("branch")),
        ("orchestrator", data.get("orchestrator")),
    ]
    edited = code.get("changed_files")
    folded = [
        (
            "Files edited since that revision",
            "\n".join(map(str, edited if isinstance(edited, list) else ())),
        ),
        ("Config", run_data.config),
        ("Environment of the ranks on node 0", "\n".join(variables)),
    ]
    return rows, folded


# All values are escaped, as they were not checked.
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(WEB),
    autoescape=True,
    trim_blocks=True,
    undefined=jinja2.StrictUndefined,
)
TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
TEMPLATES.globals["looks"] = {
    **{state: CLASSES[style] for state, style in styles.STATES.items()},
    **{"damaged": "bad", "not started": "bad", "interrupted": "warn"},
}
# The pages of the dashboard, which stand in the bar of each.
TEMPLATES.globals["bar"] = {
    "Experiments": "/",
    "Sweeps": "/sweeps",
    "Cluster": "/cluster",
    "Queue": "/queue",
}
TEMPLATES.filters["verdict"] = verdict.verdict_to_lines
for function in (
    *(
        content_hash,
        cause,
        lasted,
        figures,
        runs_table,
        clock_text,
        written,
        since,
        nodes,
        what_was_run,
    ),
    *(format_duration, count_in_thousands, command_of),
):
    TEMPLATES.filters[function.__name__] = function
