"""`orchestrator verify`: a job of ours on all nodes, what it measured, and what that means."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from orchestrator import files, text
from orchestrator.errors import EXIT_CHECK, EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, UsageError
from orchestrator.head.commands import jobs
from orchestrator.head.launch import launch as launching
from orchestrator.head.launch.request import Request
from orchestrator.head.plan.model import Target
from orchestrator.head.screen import output
from orchestrator.head.verify import chart, diagnosis, prediction, report
from orchestrator.records.experiment import Experiment

PROGRAM = "orchestrator.engine.verify"  # travels with what is shipped to every node
SMALLEST = 1 << 10


def verify(options: dict[str, Any], *, default_config: str, default_hook: str) -> int:
    request = request_of(options, default_config, default_hook)
    as_json = options["as_json"]
    # What is said on the way goes beside the JSON, not into it.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        launched = launching.launch(request, jobs.say)
        place = launched.experiment
        code = jobs.follow(place, launched.record, launched.ssh, options, launched)
    told = read(place)
    if told is None:
        if as_json:
            output.tell(json.dumps({"experiment": str(place.path), "exit_code": code}))
        return code or EXIT_FAILED
    return conclude(place, told, request, code, options)


def request_of(options: dict[str, Any], default_config: str, default_hook: str) -> Request:
    seconds = options["seconds"]
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"--seconds {seconds:g}: write how long it may measure, such as 60")
    largest = bytes_of(options["max_size"])
    job = {"module": None, "program": (), "detach": False, "dry_run": False}
    made = jobs.request_of({**options, **job}, default_config, default_hook)
    words = ["--max-size", str(largest), "--seconds", f"{seconds:g}"]
    backend = options["backend"] or made.config.distributed.backend
    words += ["--backend", backend] if backend else []
    launch = made.config.launch
    launch = replace(launch, name=options["name"] or "verify")
    return replace(
        made,
        target=Target("engine", PROGRAM, tuple(words)),
        config=replace(made.config, launch=launch),
    )


def bytes_of(wanted: str) -> int:
    """The largest size to measure."""
    count = text.parse_size("--max-size", wanted)
    if count < SMALLEST:
        raise UsageError(f"--max-size {wanted}: the smallest size that is measured is 1K")
    return count


def read(place: Experiment) -> dict[str, Any] | None:
    try:
        kept = (place.path / "outputs" / "verify.json").read_text(encoding="ascii")
        found: dict[str, Any] = json.loads(kept)
    except (OSError, ValueError):
        return None  # it ended before there was anything to write; the job's own words say why
    return found


def conclude(
    place: Experiment, told: dict[str, Any], request: Request, code: int, options: dict[str, Any]
) -> int:
    """Say what was found, keep it beside what was measured, and come to an exit code."""
    found = diagnosis.all_of(told)
    predicted = prediction.predict(told, request.config)
    code = exit_code(code, found, strict=options["strict"])
    told = {
        "exit_code": code,
        "experiment": str(place.path),
        "findings": [asdict(one) for one in found],
        "prediction": [asdict(one) for one in predicted],
        **told,
    }
    kept = keep(place, told)
    if options["as_json"]:
        output.tell(json.dumps(told, indent=1))
        return code
    look = output.look(options["color"])
    output.tell("\n" + report.to_text(told, found, predicted, look))
    for path in kept:
        jobs.say(f"kept in {path}")
    return code


def exit_code(code: int, found: list[diagnosis.Bottleneck], *, strict: bool) -> int:
    if any(one.kind == "wrong" for one in found) and code != EXIT_STOPPED:
        return EXIT_FAILED
    return EXIT_CHECK if code == EXIT_DONE and found and strict else code


def keep(place: Experiment, told: Mapping[str, Any]) -> list[Path]:
    outputs = place.path / "outputs"
    texts = {"verify.json": json.dumps(told, indent=1) + "\n", "verify.svg": chart.draw(told)}
    for name, content in texts.items():
        files.replace(outputs / name, content)
    return [outputs / name for name in texts]
