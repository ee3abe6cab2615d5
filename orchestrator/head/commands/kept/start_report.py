"""`orchestrator start-report`: show where the seconds of a start went, on each node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestrator.common.errors import EXIT_DONE, UsageError
from orchestrator.config.launch import Where
from orchestrator.head.screen import output
from orchestrator.head.screen.output import Terminal
from orchestrator.records import experiments, manifest
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.manifest import StartTimes

# Each step of the head's own: its name, what it begins with and what it ends with.
HEAD = (
    ("command", "begin", "connecting"),  # Python, the options, the config
    ("sync", "reached", "synced"),
    ("plan", "synced", "planned"),
    ("check", "planned", "checked"),
    ("record", "checked", "recorded"),
)
# Each step of a node. A step that a job does not have is part of the one after it.
NODE = (
    ("connect", "begin", "connect"),  # TCP and the login
    ("server", "connect", "server"),  # its shell and Python, and our program there
    ("facts", "server", "probe"),
    ("others", "probe", "reached"),  # the slowest node is waited for
    ("supervisor", "recorded", "supervisor"),
    ("torch", "supervisor", "torch"),  # its import
    ("rendezvous", "torch", "ranks"),
    ("output", "ranks", "output"),
)


@dataclass(frozen=True)
class Report:
    """The seconds of each step, of the head and of each node; None where it is not known."""

    head: dict[str, float | None]
    nodes: list[tuple[str, dict[str, float | None]]]

    @property
    def slowest(self) -> tuple[str, str, float] | None:
        """Return the longest step of all: the node, the step and its seconds."""
        steps = [
            (name, step, seconds)
            for name, each in [("the head", self.head), *self.nodes]
            for step, seconds in each.items()
            if seconds is not None and step not in ("total", "others")
        ]
        return max(steps, key=lambda step: step[2], default=None)


def start_report(where: Where, wanted: str | None, *, as_json: bool) -> int:
    experiment = experiments.known(where.experiments, wanted, trusted=where.trust_record)
    record, times = experiment.read_record(), manifest.start_times(experiment)
    report = report_of(times, record)
    nodes = [{"node": name, **steps} for name, steps in report.nodes]
    data = {"experiment": experiment.name, "head": report.head, "nodes": nodes}
    output.result(data, partial(to_text, experiment, report), as_json=as_json)
    return EXIT_DONE


def report_of(times: StartTimes, record: JobRecord) -> Report:
    """Subtract times from each other; whatever was never reached stays out."""
    if not times.nodes or len(times.nodes) != len(record.nodes):
        raise UsageError(
            f"nothing is known of the start of {record.job}: it was not started, or by an earlier"
            " version",
            "launch it again, then: orchestrator start-report",
        )
    head = {name: value for name, value in vars(times).items() if name != "nodes"}
    connecting = min(node.get("begin", 0.0) for node in times.nodes)
    nodes = []
    for known, node in zip(times.nodes, record.nodes, strict=True):
        moments = {**head, **known, **node.times}
        steps = durations(NODE, moments)
        last = max((node.times.get(name, 0.0) for name in ("ranks", "output")), default=0.0)
        steps["total"] = last - times.begin if last and times.begin else None
        nodes.append((node.name, steps))
    return Report(durations(HEAD, {**head, "connecting": connecting}), nodes)


def durations(
    steps: tuple[tuple[str, str, str], ...], moments: Mapping[str, float]
) -> dict[str, float | None]:
    seconds: dict[str, float | None] = {}
    missing: dict[str, float] = {}  # the end of a step that did not happen -> its beginning
    for name, begin, end in steps:
        began = moments.get(begin) or missing.get(begin, 0.0)
        ended = moments.get(end, 0.0)
        if not ended and began:
            missing[end] = began
        # Clocks of two machines may differ by a millisecond.
        seconds[name] = max(0.0, ended - began) if began and ended else None
    return seconds


def to_text(experiment: Experiment, report: Report, terminal: Terminal) -> str:
    total = max((steps["total"] or 0.0 for _, steps in report.nodes), default=0.0)
    head = ", ".join(f"{name} {cell(value)} s" for name, value in report.head.items())
    rows: list[list[Any]] = [["NODE", *(name.upper() for name, *_ in NODE), "TOTAL"]]
    rows += [[name, *map(cell, steps.values())] for name, steps in report.nodes]
    numbers = range(1, len(rows[0]))
    took = f": {total:.2f} s from the command to the first output" if total else ""
    lines = [
        f"start of {experiment.name}{took}",
        f"on the head: {head}",
        "",
        output.table(rows, terminal, right=numbers, headed=True),
    ]
    if any(steps["torch"] is None and steps["rendezvous"] for _, steps in report.nodes):
        lines += ["", "where TORCH is -, its import, if there was one, is part of RENDEZVOUS"]
    slowest = report.slowest
    if slowest is not None:
        who, step, seconds = slowest
        lines += ["", f"the longest step: {step} on {who}, {seconds:.2f} s"]
    return "\n".join(lines)


def cell(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"
