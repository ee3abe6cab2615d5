"""Compares experiments by their records: code, config, versions, nodes and results."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from typing import Any

from orchestrator.common.errors import UsageError
from orchestrator.config import resolved
from orchestrator.records import manifest
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.metrics import trainers
from orchestrator.records.metrics.curves import POINTS, Curve, rank_curves, unit_of
from orchestrator.records.outcome import JobVerdict

# The keys are dotted paths.
Section = dict[str, Any]
# {section: {key: [the value of each experiment]}}
Differences = dict[str, dict[str, list[Any]]]

NAN = "NaN"
UNREAD = "not read"
# The path of a snapshot differs in each launch.
SNAPSHOT = re.compile(r"/code/snapshots/[^/]+/")
SAME = "/code/snapshots/.../"
# These variables differ in any two jobs.
OF_THE_RUN = ("ORCHESTRATOR_EXPERIMENT", "ORCHESTRATOR_JOB", "ORCHESTRATOR_RUN")
VERSIONS = ("python_version", "torch", "software", "kernel", "accelerate")
MACHINE = ("hostname", "user", "cpus", "gpus", "memory_kb", "python", "workdir", "cards", "limits")
# Metrics that say where a line stands, or are sums of others.
APART = ("time", "left_s", "steps", "tokens", "saved_step", "saved_bytes", "saved_s")


def compare_experiments(experiments: Sequence[Experiment]) -> Differences:
    """Return what differs between experiments, and their metrics at the same steps."""
    found = find_differences(*map(describe_experiment, experiments))
    found["results"] |= differing(metrics(experiments))
    return found


# -- one experiment -------------------------------------------------------------------------------


def describe_experiment(experiment: Experiment) -> dict[str, Section]:
    """Return an experiment's data in sections; records of earlier versions lack some of them."""
    record = experiment.read_record()
    data = known(lambda: manifest.read_manifest(experiment))
    nodes = [mapping(node) for node in sequence(data.get("nodes"))]
    facts = [mapping(node.get("facts")) for node in nodes]
    names = [str(node.get("name")) for node in nodes]
    settings = [mapping(node.get("environment")) for node in nodes]
    own = {"orchestrator": data.get("orchestrator"), "python of the head": data.get("python")}
    return {
        "code": {**code(mapping(data.get("code")), data), UNREAD: data.get(UNREAD)},
        "command": {
            "command": shlex.join(record.command[1:]),
            "start": record.launch.start,
        },
        "config": flat(known(lambda: resolved.read_keys(experiment.path))),
        "versions": {**own, **of_nodes(names, [only(fact, VERSIONS) for fact in facts])},
        "nodes": {
            "nodes": [node.name for node in record.nodes],
            "ranks per node": [node.nproc for node in record.nodes],
            "master": record.master,
            **of_nodes(names, [only(everywhere(fact), MACHINE) for fact in facts]),
        },
        "environment": environment(names, settings, mapping(data.get("head_environment"))),
        "results": results(record),
    }


def code(known: Mapping[str, Any], data: Mapping[str, Any]) -> Section:
    """Return the revision, and the files that were edited since."""
    edited = ", ".join(map(str, known.get("changed_files") or ())) or None
    section = {name: value for name, value in flat(known).items() if name != "changed_files"}
    return {"directory": data.get("directory"), **section, "edited files": edited}


def known(read: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the data that `read` returns, or its error under UNREAD: the rest is comparable."""
    try:
        return dict(read())
    except UsageError as error:
        return {UNREAD: error.what}


def environment(
    names: Sequence[str], settings: Sequence[Mapping[str, Any]], head: Mapping[str, Any]
) -> Section:
    own = [
        {name: value for name, value in setting.items() if name not in OF_THE_RUN}
        for setting in settings
    ]
    # What a shell changes from one command to the next says nothing.
    passing = ("_", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES")
    of_head = {f"{name} (head)": value for name, value in head.items() if name not in passing}
    return {**of_nodes(names, own), **of_head}


def results(record: JobRecord) -> Section:
    took = record.ended - record.started if record.ended else None
    ranks = [rank for node in record.nodes for rank in node.ranks.values()]
    peaks = [rank.peak_kb for rank in ranks if rank.peak_kb is not None]
    verdict = record.verdict or JobVerdict()
    return {
        "state": record.state,
        "exit code": record.exit_code,
        "verdict": verdict.message or None,
        "where": SNAPSHOT.sub(SAME, verdict.where) or None,
        "seconds": None if took is None else round(took, 1),
        "rank_peak_bytes": max(peaks, default=0) * 1024 or None,
    }


def of_nodes(names: Sequence[str], nodes: Sequence[Mapping[str, Any]]) -> Section:
    """Return for each key the value of all nodes, or each node's where they differ."""
    flattened = [flat(node) for node in nodes]
    keys = dict.fromkeys(key for node in flattened for key in node)
    section: Section = {}
    for key in keys:
        values = [node.get(key) for node in flattened]
        same = all(value == values[0] for value in values)
        section[key] = values[0] if same else dict(zip(names, values, strict=True))
    return section


# -- what they measured ---------------------------------------------------------------------------


def metrics(experiments: Sequence[Experiment]) -> dict[str, list[Any]]:
    """Return the metrics of each first rank: medians, peaks, or values at one step."""
    files = [trainers.file_of_first_rank(experiment.path / "outputs") for experiment in experiments]
    every = [read_curves(experiment) for experiment in experiments]
    rows: dict[str, list[Any]] = {
        "steps": [max((c.steps[-1] for c in each.values()), default=None) for each in every],
        # A loss that is NaN or infinite is in no curve.
        "loss, last": [
            NAN if trainers.read_last_values(path).loss_is_lost else None for path in files
        ],
    }
    for name in dict.fromkeys(name for each in every for name in each):
        if name not in APART:
            key, values = at_one_step(name, [each.get(name, Curve()) for each in every])
            rows[key] = values
    return rows


def read_curves(experiment: Experiment) -> dict[str, Curve]:
    """Return the metrics of the newest Trainer's first rank."""
    path = trainers.file_of_first_rank(experiment.path / "outputs")
    return {} if path is None else rank_curves(path, POINTS)


def at_one_step(name: str, of_name: Sequence[Curve]) -> tuple[str, list[Any]]:
    """Return what a metric is compared by: a speed by its median, a loss at the same step."""
    unit = unit_of(name)
    if unit == "bytes":
        return f"{name}, most", [max(curve.highs, default=None) for curve in of_name]
    if unit:
        return f"{name}, median", [median_low(c.means) if c.steps else None for c in of_name]
    step = min(curve.steps[-1] for curve in of_name if curve.steps)
    values = [
        next((v for at, v in zip(c.steps[::-1], c.means[::-1], strict=True) if at <= step), None)
        for c in of_name
    ]
    return f"{name} at step {step}", values


# -- some of them ---------------------------------------------------------------------------------


def differing(rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row[1:])}


def find_differences(*described: Mapping[str, Section]) -> Differences:
    """Return the keys whose values are not all equal, in their order; a missing one is None."""
    found: Differences = {}
    for name in described[0]:
        keys = dict.fromkeys(key for each in described for key in each[name])
        found[name] = differing({key: [each[name].get(key) for each in described] for key in keys})
    return found


# -- unchecked data -----------------------------------------------------------------


def sequence(data: Any) -> list[Any]:
    return data if isinstance(data, list) else []


def only(data: Mapping[str, Any], names: Sequence[str]) -> Section:
    return {name: data[name] for name in names if name in data}


def everywhere(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts with the launch's snapshot directory replaced by a common name."""
    workdir = SNAPSHOT.sub(SAME, str(facts.get("workdir") or ""))
    return {**facts, "workdir": workdir} if "workdir" in facts else dict(facts)


def mapping(data: Any) -> dict[str, Any]:
    """Return unchecked data as a mapping; anything else becomes an empty one."""
    return {str(key): value for key, value in data.items()} if isinstance(data, dict) else {}


def flat(data: Mapping[str, Any], before: str = "") -> Section:
    """Return nested keys as one level, with dots between them."""
    section: Section = {}
    for key, value in data.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            section.update(flat(mapping(value), f"{name}."))
        else:
            section[name] = value
    return section
