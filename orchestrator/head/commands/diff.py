"""`orchestrator diff`: show what differs between two experiments, from their records alone."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.common.errors import EXIT_DONE, CheckFailed, UsageError
from orchestrator.config import resolved
from orchestrator.config.launch import Where
from orchestrator.head.screen import output, styles
from orchestrator.head.screen.output import Cell, Terminal
from orchestrator.head.status import settings
from orchestrator.head.status.settings import Section, flat, mapping
from orchestrator.head.transfer.code import archive
from orchestrator.records import experiments, manifest
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.metrics import trainers
from orchestrator.records.metrics.curves import CACHE, POINTS, Curve, curves, median
from orchestrator.records.metrics.names import WORDS, better, unit_of, written
from orchestrator.records.outcome import Verdict

Differences = dict[str, dict[str, list[Any]]]  # section -> key -> a value of each

NOTHING = "-"
NAN = "NaN"
UNREAD = "not read"
MOST_TRAINERS = 8  # of a program: its last ones
MOST_FILES = 30  # of the code
SNAPSHOT = re.compile(r"/code/snapshots/[^/]+/")  # another for each launch
SAME = "/code/snapshots/.../"
SHORTEST_COLUMNS = 12  # of a value
WIDEST = 160  # columns of what is no terminal
LONGEST_KEY, CHANGE_COLUMNS = 40, 22
OF_THE_RUN = ("ORCHESTRATOR_EXPERIMENT", "ORCHESTRATOR_JOB", "ORCHESTRATOR_RUN")  # never equal
WORDED = {**WORDS, "seconds": "time", "rank_peak_bytes": "memory of a rank"}
NUMBERED = ("exit code",)  # no measure
NEITHER = ("seconds", "steps")  # more of it is neither better nor worse
VERSIONS = ("python_version", "torch", "software", "kernel", "accelerate")
MACHINE = ("hostname", "user", "cpus", "gpus", "memory_kb", "python", "workdir", "cards", "limits")
MEASURED = re.compile(r"(.+?)(, median|, most|, last| at step [0-9]+)?( \(Trainer [0-9]+\))?")
# Metrics that say where a line stands, or are sums of others.
APART = ("time", "left_s", "steps", "tokens", "saved_step", "saved_bytes", "saved_s")
FILE = re.compile(r'^diff --git "?a/(.*?)"? "?b/.*$', re.MULTILINE)


def diff(where: Where, first: str, second: str) -> int:
    root, trusted = where.experiments, where.trust_record
    pair = [experiments.known(root, name, trusted=trusted) for name in (first, second)]
    found = compared(pair)
    found["code"] |= differing_files(*pair)
    names = [experiment.name for experiment in pair]
    data = {
        "experiments": names,
        "differences": found,
        "changes": {
            key: changed for key, row in found["results"].items() if (changed := change(key, row))
        },
    }
    output.result(data, partial(to_text, names, found))
    return EXIT_DONE


def compared(experiments: Sequence[Experiment]) -> Differences:
    """Return what differs between experiments, and their metrics at the same steps."""
    found = differences(*map(describe, experiments))
    found["results"] |= differing(metrics(experiments))
    return found


# -- one experiment -------------------------------------------------------------------------------


def describe(experiment: Experiment) -> dict[str, Section]:
    """Gather what can differ, in sections; what an earlier version did not write is missing."""
    record = experiment.read_record()
    data = known(lambda: manifest.read(experiment))
    nodes = [mapping(node) for node in sequence(data.get("nodes"))]
    facts = [mapping(node.get("facts")) for node in nodes]
    names = [str(node.get("name")) for node in nodes]
    settings = [mapping(node.get("environment")) for node in nodes]
    own = {"orchestrator": data.get("orchestrator"), "python of the head": data.get("python")}
    return {
        "code": {**code(mapping(data.get("code")), data), UNREAD: data.get(UNREAD)},
        "command": command(record),
        "config": flat(known(lambda: resolved.read(experiment.path))),
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


def command(record: JobRecord) -> Section:
    """Describe what was typed, and each option of the program by its name."""
    typed = () if record.engine else settings.arguments(record.command)  # its config has them
    options = {f"option {name}": value for name, value in settings.options(typed)}
    return {"command": shlex.join(record.command[1:]), "start": record.launch.start, **options}


def code(known: Mapping[str, Any], data: Mapping[str, Any]) -> Section:
    """Describe the revision, and each file that was edited since: its lines, and their hash."""
    section = {name: value for name, value in flat(known).items() if not name.startswith("diff")}
    section.pop("changed_files", None)
    for name, text in changed_files(str(known.get("diff") or "")).items():
        lines = text.splitlines()
        more = sum(line.startswith("+") and not line.startswith("+++") for line in lines)
        less = sum(line.startswith("-") and not line.startswith("---") for line in lines)
        digest = hashlib.sha256(text.encode()).hexdigest()[:7]
        section[f"edited {name}"] = f"+{more} -{less} ({digest})"
    return {"directory": data.get("directory"), **section}


def known(read: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Read a file, or say why not: a copy may have ended half-way, and all else can be compared."""
    try:
        return dict(read())
    except UsageError as error:
        return {UNREAD: error.what}


def differing_files(*experiments: Experiment) -> dict[str, list[Any]]:
    """Name the files whose contents are not equal in the code that was kept of each."""
    trees = [known(partial(manifest.read, each)).get("tree") for each in experiments]
    if None in trees or len({*map(str, trees)}) == 1:
        return {}
    rows: dict[str, list[Any]] = {"tree": [str(tree)[:12] for tree in trees]}
    try:
        kept = [archive.digests(experiment.path / archive.NAME) for experiment in experiments]
    except CheckFailed:  # it was not kept, and the git revision has to do
        return rows
    names = sorted({name for each in kept for name in each})
    differ = [name for name in names if len({each.get(name) for each in kept}) > 1]
    for name in differ[:MOST_FILES]:
        rows[f"file {name}"] = [each.get(name) for each in kept]
    if len(differ) > MOST_FILES:
        rows["more files that differ"] = [len(differ) - MOST_FILES] * len(kept)
    return rows


def changed_files(diff: str) -> dict[str, str]:
    """Divide a diff by files."""
    parts = FILE.split(diff)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


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
    verdict = record.verdict or Verdict()
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
    """Return the metrics of each Trainer's first rank: medians, peaks, or values at one step."""
    outputs = [experiment.path / "outputs" for experiment in experiments]
    files = [first_files(each) for each in outputs]
    every = [read_curves(*pair) for pair in zip(outputs, files, strict=True)]
    # A loss that is NaN or infinite is in no curve.
    lost = [{t for t, path in each.items() if trainers.last(path).loss_is_lost} for each in files]
    rows: dict[str, list[Any]] = {}
    for trainer in sorted({trainer for each in every for trainer in each})[-MOST_TRAINERS:]:
        whose = f" (Trainer {trainer})" if trainer > 1 else ""
        known = [each.get(trainer, {}) for each in every]
        last = [max((c.steps[-1] for c in each.values()), default=None) for each in known]
        rows[f"steps{whose}"] = last
        rows[f"loss, last{whose}"] = [NAN if trainer in each else None for each in lost]
        for name in dict.fromkeys(name for each in known for name in each):
            if name not in APART:
                of_name = [each.get(name, Curve()) for each in known]
                key, values = at_one_step(name, of_name)
                rows[f"{key}{whose}"] = values
    return rows


def first_files(outputs: Path) -> dict[int, Path]:
    """Return the metrics of each Trainer's first rank."""
    return {trainer: files[min(files)] for trainer, files in trainers.every(outputs).items()}


def read_curves(outputs: Path, files: Mapping[int, Path]) -> dict[int, dict[str, Curve]]:
    with CACHE.alone(outputs):
        return {trainer: curves(path, POINTS) for trainer, path in files.items()}


def at_one_step(name: str, of_name: Sequence[Curve]) -> tuple[str, list[Any]]:
    """Return what a metric is compared by: a speed by its median, a loss at the same step."""
    unit = unit_of(name)
    if unit == "bytes":
        return f"{name}, most", [max(curve.highs, default=None) for curve in of_name]
    if unit:
        return f"{name}, median", [median(c.means) if c.steps else None for c in of_name]
    step = min(curve.steps[-1] for curve in of_name if curve.steps)
    values = [
        next((v for at, v in zip(c.steps[::-1], c.means[::-1], strict=True) if at <= step), None)
        for c in of_name
    ]
    return f"{name} at step {step}", values


def change(key: str, values: Sequence[Any]) -> dict[str, Any] | None:
    """Return by how much the second of two numbers is more, and whether that is better."""
    name = measured(key)
    first, second = values[0], values[1]
    if name in NUMBERED or not all(type(value) in (int, float) for value in values):
        return None
    more = second - first
    better_is = "" if name in NEITHER else better(name)
    good = None if not better_is or not more else (more < 0) == (better_is == "least")
    share = more / abs(first) if first else None
    return {"unit": unit_of(name), "difference": more, "ratio": share, "better": good}


def measured(key: str) -> str:
    """Return the metric that a row is about."""
    match = MEASURED.fullmatch(key)
    return match[1] if match else key


# -- some of them ---------------------------------------------------------------------------------


def differing(rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row[1:])}


def differences(*described: Mapping[str, Section]) -> Differences:
    """Return the keys whose values are not all equal, in their order; a missing one is None."""
    found: Differences = {}
    for name in described[0]:
        keys = dict.fromkeys(key for each in described for key in each[name])
        found[name] = differing({key: [each[name].get(key) for each in described] for key in keys})
    return found


def to_text(names: Sequence[str], found: Differences, terminal: Terminal) -> str:
    """Return a table of each section with a difference, no wider than the terminal."""
    same = [name for name, section in found.items() if not section]
    parts = ["\n".join(f"{letter}  {name}" for letter, name in zip("AB", names, strict=True))]
    parts += [section_text(name, rows, terminal) for name, rows in found.items() if rows]
    return "\n\n".join([*parts, *([f"the same: {', '.join(same)}"] if same else [])])


def section_text(name: str, rows: Mapping[str, Sequence[Any]], terminal: Terminal) -> str:
    """Return a table, and below it the values that are too long for one."""
    results = name == "results"
    changes = {key: known for key, row in rows.items() if results and (known := change(key, row))}
    keys = {key: worded(key)[:LONGEST_KEY] for key in rows}
    width = terminal.width or WIDEST
    used = max(map(len, (name, *keys.values()))) + 4 + (CHANGE_COLUMNS if changes else 0)
    room = max(SHORTEST_COLUMNS, (width - used) // 2)
    drawn: list[list[Cell]] = [[name.upper(), "A", "B", *["B - A"] * bool(changes)]]
    long = ""
    for key, row in rows.items():
        cells = [in_words(value, unit_of(measured(key)) if results else "") for value in row]
        if max(map(len, cells)) > room:
            pair = zip("AB", around_difference(cells, width - 5), strict=True)
            long += "".join(
                [f"\n{keys[key]}", *(f"\n  {letter}  {value}" for letter, value in pair)]
            )
        else:
            last = [changed(changes[key]) if key in changes else ""] if changes else []
            drawn.append([keys[key], *cells, *last])
    return output.table(drawn, terminal, headed=True) + output.printable(long)


def worded(key: str) -> str:
    """Return a row's name in words."""
    name = measured(key)
    return WORDED.get(name, name) + key.removeprefix(name)


def changed(known: Mapping[str, Any]) -> Cell:
    """Write a change as a number and in percent, green where it is better."""
    share = "" if known["ratio"] is None else f" ({known['ratio']:+.1%})"
    sign = "+" if known["difference"] > 0 else ""
    style = {True: styles.DONE, False: styles.WARNING, None: ""}[known["better"]]
    return f"{sign}{written(known['difference'], known['unit'])}{share}", style


def around_difference(texts: Sequence[str], room: int) -> list[str]:
    """Cut two long values to what is around their first difference."""
    equal = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    common = sum(1 for _ in equal)
    begin = max(0, common - room // 3) if max(map(len, texts)) > room else 0
    cut = [f"...{text[begin:]}" if begin else text for text in texts]
    return [text if len(text) <= room else f"{text[: room - 3]}..." for text in cut]


def in_words(value: Any, unit: str) -> str:
    if value is None:
        return NOTHING
    if type(value) in (int, float):
        return written(value, unit)
    if isinstance(value, str) and value:
        return " ".join(value.split())
    return json.dumps(value, ensure_ascii=False)


# -- data that nobody has checked -----------------------------------------------------------------


def sequence(data: Any) -> list[Any]:
    return data if isinstance(data, list) else []


def only(data: Mapping[str, Any], names: Sequence[str]) -> Section:
    return {name: data[name] for name in names if name in data}


def everywhere(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write the directory of a launch's own snapshot as if it were that of all."""
    workdir = SNAPSHOT.sub(SAME, str(facts.get("workdir") or ""))
    return {**facts, "workdir": workdir} if "workdir" in facts else dict(facts)
