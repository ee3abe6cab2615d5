"""`orchestrator verify`: run the measuring program on all nodes and explain its figures."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from orchestrator.common import files, text
from orchestrator.common.errors import EXIT_CHECK, EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, UsageError
from orchestrator.common.text import duration
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.commands import follow
from orchestrator.head.plan.model import Target
from orchestrator.head.screen import output, styles
from orchestrator.head.screen.output import PLAIN, Cell, Terminal, paint, say, table
from orchestrator.head.start import launch as starting
from orchestrator.head.start.request import Request, resolve
from orchestrator.records.experiment import Experiment
from orchestrator.views.verify import diagnosis
from orchestrator.views.verify.diagnosis import Bottleneck, operations, size

PROGRAM = "orchestrator.engine.verify"  # travels with what is shipped to every node
SMALLEST = 1 << 10


@dataclass(frozen=True)
class Measurement:
    """The options of the measurement."""

    backend: str | None
    max_size: str
    seconds: float


def verify(arguments: LaunchArguments, measurement: Measurement, *, strict: bool) -> int:
    request = request_of(arguments, measurement)
    # With --json, messages on the way go to standard error.
    with contextlib.redirect_stdout(sys.stderr) if output.as_json() else contextlib.nullcontext():
        launched = starting.launch(request)
        experiment = launched.experiment
        code = follow.follow_launched(launched, arguments.view)
    measured = read(experiment)
    if measured is None:
        if output.as_json():
            output.write_out(json.dumps({"experiment": str(experiment.path), "exit_code": code}))
        return code or EXIT_FAILED
    return conclude(experiment, measured, code, strict=strict)


def request_of(arguments: LaunchArguments, measurement: Measurement) -> Request:
    seconds = measurement.seconds
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(
            f"--seconds {seconds:g}: write how many seconds it may measure, such as 60"
        )
    largest = text.parse_size("--max-size", measurement.max_size)
    if largest < SMALLEST:
        raise UsageError(f"--max-size {measurement.max_size}: the smallest size measured is 1K")
    request = resolve(arguments)
    options = ["--max-size", str(largest), "--seconds", f"{seconds:g}"]
    backend = measurement.backend or request.config.distributed.backend
    options += ["--backend", backend] if backend else []
    launch = replace(request.config.launch, name=arguments.launch.get("name", "verify"))
    return replace(
        request,
        target=Target("engine", PROGRAM, tuple(options)),
        config=replace(request.config, launch=launch),
    )


def read(experiment: Experiment) -> dict[str, Any] | None:
    try:
        with files.open_plain(experiment.path / "outputs" / "verify.json") as file:
            results: dict[str, Any] = json.load(file)
    except (OSError, ValueError):
        return None  # the job ended before there was anything to write, and has said why
    return results


def conclude(experiment: Experiment, measured: dict[str, Any], code: int, *, strict: bool) -> int:
    """Print the findings, keep them with the measurement, and return the exit code."""
    bottlenecks = diagnosis.all_of(measured)
    if any(each.kind == "wrong" for each in bottlenecks) and code != EXIT_STOPPED:
        code = EXIT_FAILED
    elif code == EXIT_DONE and bottlenecks and strict:
        code = EXIT_CHECK
    findings = [asdict(each) for each in bottlenecks]
    about = {"exit_code": code, "experiment": str(experiment.path), "findings": findings}
    whole = json.dumps({**about, **measured}, indent=1)
    path = experiment.path / "outputs" / "verify.json"
    files.replace(path, f"{whole}\n")
    if output.as_json():
        output.write_out(whole)
        return code
    output.write_out("\n" + to_text(measured, bottlenecks, output.terminal()))
    say(f"kept in {path}")
    return code


# -- the report -------------------------------------------------------------------------------


WIDEST = 12  # nodes whose pairs are shown as a matrix
ENDED = {  # why sizes are missing
    "time": "larger sizes are left out where their time was up; more with --seconds",
    "memory": "larger sizes are left out: the ranks do not have the memory for them",
}


def to_text(
    results: Mapping[str, Any], findings: Sequence[Bottleneck], terminal: Terminal = PLAIN
) -> str:
    blocks = measured(results, terminal)
    for finding in findings:
        wrong = finding.kind == "wrong"
        words = f"{'WRONG' if wrong else 'SLOW'}: {finding.text}"
        blocks.append(paint(words, styles.FAILED if wrong else styles.WARNING, terminal))
    if not results.get("complete", True):
        words = "the run ended before everything was measured"
        blocks.append(paint(words, styles.WARNING, terminal))
    elif not findings:
        blocks.append(paint(all_well(results), styles.DONE, terminal))
    return "\n\n".join(blocks) + "\n"


def all_well(results: Mapping[str, Any]) -> str:
    if len(results["devices"]) == 1:
        return "one rank alone: there is no link to verify"
    return "every result is right, no node, link or device is slower than the others"


def measured(results: Mapping[str, Any], terminal: Terminal) -> list[str]:
    """Return a table of collectives by size, one of pairs of nodes, and a line for each device."""
    blocks = []
    rows = results.get("collectives", [])
    if timed := {(row["collective"], row["bytes"]): row for row in rows}:
        names = list(dict.fromkeys(name for name, _ in timed))
        lines: list[list[Cell]] = [["", *names]]
        for count in sorted({count for _, count in timed}):
            lines.append([size(count), *(cell(timed.get((name, count))) for name in names)])
        heading = f"among all {rows[0]['ranks']} ranks: time of one call, bus bandwidth in Gb/s"
        blocks.append(f"{heading}\n{figures(lines, terminal)}")
    blocks += [ENDED[reason] for reason in results.get("notes", [])]
    rates = {(r["from"], r["to"]): f"{8e-9 * r['rate']:.3g}" for r in results.get("pairs", [])}
    nodes = sorted({node for pair in rates for node in pair})
    if 0 < len(nodes) <= WIDEST:
        lines = [["", *(f"node {node}" for node in nodes)]]
        lines += [[f"node {a}", *(rates.get((a, b), "-") for b in nodes)] for a in nodes]
        delays = sorted(row["latency"] for row in results["pairs"])
        spread = f"one way {duration(delays[0])} to {duration(delays[-1])}"
        blocks.append(f"from a node to a node, Gb/s ({spread})\n{figures(lines, terminal)}")
    for kind in sorted(set(results["devices"])):
        pairs = zip(results["flops"], results["devices"], strict=True)
        flops = [rate for rate, its in pairs if its == kind]
        between = f"{operations(min(flops))} to {operations(max(flops))}"
        blocks.append(f"multiplying matrices, {len(flops)} x {kind}: {between}")
    return blocks


def figures(rows: Sequence[Sequence[Cell]], terminal: Terminal) -> str:
    """Return a table of numbers, with headings above and at the left."""
    return table(rows, terminal, right=range(1, len(rows[0])), headed=True, indent=2)


def cell(row: Mapping[str, Any] | None) -> str:
    return "-" if row is None else f"{duration(row['seconds'])} {8e-9 * row['busbw']:8.3f}"
