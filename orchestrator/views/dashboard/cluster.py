"""Looks at all nodes of the list for the page of the cluster, while somebody has it open."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from orchestrator.common.errors import UsageError
from orchestrator.common.text import plural
from orchestrator.config.launch import Where
from orchestrator.head.doctor import last_look
from orchestrator.head.doctor.findings import BAD
from orchestrator.head.doctor.last_look import LastLook
from orchestrator.head.nodes.node_list import Node, read_nodes
from orchestrator.head.screen import styles
from orchestrator.head.screen.output import Table, printable
from orchestrator.head.status.find_job import without_record
from orchestrator.records import cordons
from orchestrator.records.machines import machine_of
from orchestrator.views.top import heat, table
from orchestrator.views.top.sample import NodeSample, Sample, Watch

R = TypeVar("R")
PATIENCE_SECONDS = 1.0  # with a node, until the others are shown without it
LOOKS = {styles.FAILED: "bad", styles.WARNING: "warn", styles.DONE: "good", styles.DIM: "soft"}
NEVER = LastLook(0.0)


@dataclass
class Cluster:
    """The nodes of a list, with a connection to each from the first look to `close`."""

    where: Where
    nodes: Sequence[Node] = ()
    watch: Watch | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def render(self) -> bytes:
        """Return what the page shows, as JSON; UsageError where there is no list."""
        with self.lock:
            if self.watch is None:
                where = self.where
                self.nodes = read_nodes(where.node_list)
                transport = without_record(where)
                self.watch = Watch(transport, self.nodes, where.experiments, where.trust_record)
                self.watch.patience = PATIENCE_SECONDS
            text = json.dumps(data(self.watch.observe(), self.nodes), separators=(",", ":"))
            return text.encode()

    def close(self) -> None:
        with self.lock:
            watch, self.watch = self.watch, None
        if watch is not None:
            watch.close()


def data(sample: Sample, nodes: Sequence[Node]) -> dict[str, Any]:
    """Return both tables of `top`, and of each node its GPUs, its processes and its health."""
    problems, looks, cordoned = remembered()
    gpus = any(node.gpus for node in sample.nodes)
    rows = []
    for node, seen in zip(nodes, sample.nodes, strict=True):
        look = looks.get(machine_of(node), NEVER)
        health = list(health_of(seen, cordons.words_of(node, cordoned), look))
        name, *cells, who = drawn(table.NODES, seen)
        who = who if seen.checkup is not None else ("-", "")
        rows.append(
            {
                "name": seen.name,
                "cells": [name, in_short(health, look), who, *cells],
                "marks": [mark_of(mark) for mark in heat.of_node(seen, gpus=gpus)],
                "parts": [drawn(table.PARTS, part) for part in table.parts_of(seen)],
                "health": health,
                "looked": look.time or None,
            }
        )
    jobs = table.job_table(sample.time)
    return {
        "summary": summary(sample),
        "problems": problems,
        "gpus": gpus,
        "nodes": {"headings": ["NODE", "HEALTH", "WHO", *table.NODES.headings[1:-1]], "rows": rows},
        "parts": table.PARTS.headings,
        "jobs": {
            "headings": jobs.headings,
            "rows": [
                {"experiment": job.experiment, "cells": drawn(jobs, job)} for job in sample.jobs
            ],
        },
    }


def remembered() -> tuple[list[str], last_look.Looks, cordons.Cordons]:
    """Return what is known of machines from earlier, and why some of it cannot be read."""
    try:
        return [], last_look.read(), cordons.read()
    except UsageError as error:
        return [error.what], {}, {}


def summary(sample: Sample) -> str:
    reached = sum(node.checkup is not None for node in sample.nodes)
    gpus = [gpu for node in sample.nodes for gpu in node.gpus]
    busy = sum((gpu.busy or 0) >= 100 * table.IDLE for gpu in gpus)
    words = [f"{reached} of {plural(len(sample.nodes), 'node')}", plural(len(sample.jobs), "job")]
    return ", ".join([*words, *[f"{busy} of {len(gpus)} GPUs in use"] * bool(gpus)])


def drawn(columns: Table[R], row: R) -> list[tuple[str, str]]:
    """Return the cells of a row, each with the class that its style has on the page."""
    cells = ((cell, "") if isinstance(cell, str) else cell for cell in columns.cells(row))
    return [(printable(text), LOOKS.get(style, "")) for text, style in cells]


def mark_of(mark: heat.Mark) -> dict[str, Any]:
    return {"share": mark.share, "sick": mark.sick}


def in_short(health: Sequence[Mapping[str, str]], look: LastLook) -> tuple[str, str]:
    """Return the worst of it, or that all is well where the doctor has said so."""
    worst = sorted(health, key=lambda each: each["look"] != "bad")[:1]
    for each in worst:
        return each["what"], each["look"]
    return ("well", "good") if look.time else ("-", "")


def health_of(node: NodeSample, cordoned: str, look: LastLook) -> Iterator[dict[str, str]]:
    """Yield what is the matter with a node: now, by its cordon, and as the doctor saw it."""
    if node.problem:
        yield {"look": "warn", "what": node.problem, "fix": ""}
    for gpu in node.gpus:
        if gpu.problem:
            yield {"look": "bad", "what": f"GPU {gpu.index}: {gpu.problem}", "fix": ""}
    if cordoned:
        yield {"look": "warn", "what": f"cordoned ({cordoned})", "fix": ""}
    for each in look.findings:
        level = "bad" if each.level == BAD else "warn"
        yield {"look": level, "what": f"doctor: {each.what}", "fix": each.fix}
