"""`orchestrator verify`: run the measuring program on all nodes and explain its figures."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from orchestrator.common import files, text
from orchestrator.common.errors import EXIT_CHECK, EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, UsageError
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.commands import follow
from orchestrator.head.plan.model import Target
from orchestrator.head.screen import output
from orchestrator.head.screen.output import say
from orchestrator.head.start import launch as starting
from orchestrator.head.start.request import Request, resolve
from orchestrator.records.experiment import Experiment
from orchestrator.views.verify import diagnosis, report

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
    output.write_out("\n" + report.to_text(measured, bottlenecks, output.terminal()))
    say(f"kept in {path}")
    return code
