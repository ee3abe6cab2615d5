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
from orchestrator.head.transfer.code import archive
from orchestrator.records import experiments, manifest
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.metrics import trainers
from orchestrator.records.outcome import Verdict

Section = dict[str, Any]  # a key, with dots for what is inside, and its value
Differences = dict[str, dict[str, list[Any]]]  # section -> key -> a value of each

NOTHING = "-"
UNREAD = "not read"
MOST_TRAINERS = 8  # of a program: its last ones
MOST_FILES = 30  # of the code
SNAPSHOT = re.compile(r"/code/snapshots/[^/]+/")  # another for each launch
SAME = "/code/snapshots/.../"
SHORTEST_COLUMNS = 24  # of a value
BEFORE_CHARACTERS = 20  # that are shown before the first difference of two long values
OF_THE_RUN = ("ORCHESTRATOR_EXPERIMENT", "ORCHESTRATOR_JOB", "ORCHESTRATOR_RUN")  # never equal
VERSIONS = ("python_version", "torch", "software", "kernel", "accelerate")
MACHINE = ("hostname", "user", "cpus", "gpus", "memory_kb", "python", "workdir", "cards", "limits")
FILE = re.compile(r'^diff --git "?a/(.*?)"? "?b/.*$', re.MULTILINE)


def diff(where: Where, first: str, second: str, *, as_json: bool) -> int:
    root, trusted = where.experiments, where.trust_record
    pair = [experiments.known(root, name, trusted=trusted) for name in (first, second)]
    described = [describe(experiment) for experiment in pair]
    found = differences(*described)
    found["code"] |= differing_files(*pair)
    names = [experiment.name for experiment in pair]
    data = {"experiments": names, "differences": found}
    output.result(data, partial(to_text, names, found), as_json=as_json)
    return EXIT_DONE


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
        "command": {"command": shlex.join(record.command[1:]), "start": record.launch.start},
        "config": flat(known(lambda: resolved.read(experiment.path))),
        "versions": {**own, **of_nodes(names, [only(fact, VERSIONS) for fact in facts])},
        "nodes": {
            "nodes": [node.name for node in record.nodes],
            "ranks per node": [node.nproc for node in record.nodes],
            "master": record.master,
            **of_nodes(names, [only(everywhere(fact), MACHINE) for fact in facts]),
        },
        "environment": environment(names, settings, mapping(data.get("head_environment"))),
        "results": results(experiment, record),
    }


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


def results(experiment: Experiment, record: JobRecord) -> Section:
    took = record.ended - record.started if record.ended else None
    ranks = [rank for node in record.nodes for rank in node.ranks.values()]
    peaks = [rank.peak_kb for rank in ranks if rank.peak_kb is not None]
    verdict = record.verdict or Verdict()
    section = {
        "state": record.state,
        "exit code": record.exit_code,
        "verdict": verdict.message or None,
        "where": SNAPSHOT.sub(SAME, verdict.where) or None,
        "seconds": None if took is None else round(took, 1),
        "peak memory of a rank, kB": max(peaks, default=None),
    }
    return {**section, **last_metrics(experiment.path / "outputs")}


def last_metrics(outputs: Path) -> Section:
    """Return the last line of each Trainer's first rank."""
    section: Section = {}
    for trainer, files in list(trainers.every(outputs).items())[-MOST_TRAINERS:]:
        whose = f" (Trainer {trainer})" if trainer > 1 else ""
        for name, value in trainers.last(files[min(files)]).line.items():
            if name not in ("time", "rank"):
                section[f"last {trainers.shortened(name)}{whose}"] = value
    return section


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


# -- some of them ---------------------------------------------------------------------------------


def differences(*described: Mapping[str, Section]) -> Differences:
    """Return the keys whose values are not all equal, in their order; a missing one is None."""
    found: Differences = {}
    for name in described[0]:
        keys = dict.fromkeys(key for each in described for key in each[name])
        rows = {key: [each[name].get(key) for each in described] for key in keys}
        found[name] = {k: row for k, row in rows.items() if any(v != row[0] for v in row[1:])}
    return found


def to_text(names: Sequence[str], found: Differences, terminal: Terminal) -> str:
    same = [name for name, section in found.items() if not section]
    rows: list[list[Cell]] = [["", *names]]
    keys = [f"  {key}" for section in found.values() for key in section]
    room = max(
        SHORTEST_COLUMNS, ((terminal.width or 160) - max(map(len, keys), default=0) - 4) // 2
    )
    for name, section in found.items():
        if section:
            rows.append([(name, styles.STRONG), "", ""])
            rows += [[f"  {key}", *shown(pair, room)] for key, pair in section.items()]
    lines = [output.table(rows, terminal, headed=True)] if len(same) < len(found) else []
    if same:
        lines.append(f"the same: {', '.join(same)}")
    return "\n\n".join(lines)


def shown(pair: Sequence[Any], room: int) -> list[str]:
    """Write two values; of long ones what is around their first difference."""
    texts = [written(value) for value in pair]
    equal = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    common = sum(1 for _ in equal)
    begin = max(0, common - BEFORE_CHARACTERS) if max(map(len, texts)) > room else 0
    cut = [f"...{text[begin:]}" if begin else text for text in texts]
    return [text if len(text) <= room else f"{text[: room - 3]}..." for text in cut]


def written(value: Any) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str) and value:
        return " ".join(value.split())
    return json.dumps(value, ensure_ascii=False)


# -- data that nobody has checked -----------------------------------------------------------------


def mapping(data: Any) -> dict[str, Any]:
    return {str(key): value for key, value in data.items()} if isinstance(data, dict) else {}


def sequence(data: Any) -> list[Any]:
    return data if isinstance(data, list) else []


def only(data: Mapping[str, Any], names: Sequence[str]) -> Section:
    return {name: data[name] for name in names if name in data}


def everywhere(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write the directory of a launch's own snapshot as if it were that of all."""
    workdir = SNAPSHOT.sub(SAME, str(facts.get("workdir") or ""))
    return {**facts, "workdir": workdir} if "workdir" in facts else dict(facts)


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
