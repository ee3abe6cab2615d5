"""`orchestrator logs --system`: what the head, the supervisors and the servers of a job did.

The lines of the nodes are fetched into logs/system/ of the experiment, for a job that runs and for
one that is over. Where a node cannot be reached, those that were fetched of it before are shown.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from orchestrator.common import files, hiding
from orchestrator.common.errors import EXIT_DONE, EXIT_NODE, OrchestratorError
from orchestrator.config.launch import Where
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import ask_once
from orchestrator.head.screen import failures, output
from orchestrator.head.status.find_job import find_job
from orchestrator.protocol.requests.follow import AskSystem, SystemLines
from orchestrator.protocol.timing import ANSWER_SECONDS
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord

MARGIN_SECONDS = 120.0  # before and after the job: the clocks of its nodes are not ours
DIRECTORY = "system"


def show(where: Where, wanted: str | None, node: int | None, last: int | None) -> int:
    """Fetch the lines of all nodes, or of one, and show them below those of the head."""
    job = find_job(where, wanted)
    record, experiment = job.record, job.experiment
    record.check_choice(node, None, "--{} {}")
    nodes = [one for one in record.nodes if node in (None, one.index)]

    def fetch(one: NodeRecord) -> None:
        keep(experiment, one, ask_once(job.transport, one, question(record, one), ANSWER_SECONDS))

    answers = fleet.everywhere(nodes, fetch)
    if node is None:
        show_files("head", [Path(f"{experiment.head_log}.1"), experiment.head_log], last)
    for one, answer in zip(nodes, answers, strict=True):
        who = f"node {one.index} ({one.name})"
        if isinstance(answer, OrchestratorError):
            output.complain(f"orchestrator: {who} cannot be asked: {answer}")
        for kind in ("supervisor", "server"):
            show_files(f"{who}, {kind}", [place(experiment, one, kind)], last)
    return EXIT_NODE if failures.failures(nodes, answers) else EXIT_DONE


def question(record: JobRecord, node: NodeRecord) -> AskSystem:
    """Return what is asked of a node: about its part in each attempt, and the time of all."""
    parts = [
        (attempt.job, attempt.nodes.index(node.name))
        for attempt in record.attempts
        if node.name in attempt.nodes
    ]
    parts = list(dict.fromkeys([*parts, (record.job, node.index)]))
    until = (record.ended or time.time()) + MARGIN_SECONDS
    return AskSystem(parts=tuple(parts), since=record.started - MARGIN_SECONDS, until=until)


def place(experiment: Experiment, node: NodeRecord, kind: str) -> Path:
    return experiment.logs / DIRECTORY / f"{experiment.log(node).stem}_{kind}.txt"


def keep(experiment: Experiment, node: NodeRecord, lines: SystemLines) -> None:
    """Write the lines of a node into the experiment, in the place of what was there of it."""
    directory = experiment.logs / DIRECTORY
    with contextlib.suppress(FileExistsError):
        files.make_private(directory)
    for kind, text in (("supervisor", lines.supervisor), ("server", lines.server)):
        if text:  # else a node that was pruned would take away what is here
            files.replace(place(experiment, node, kind), hiding.redacted_text(text))


def show_files(title: str, paths: Sequence[Path], last: int | None) -> None:
    """Print some files as one below a title, or their last lines."""
    lines: list[str] = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            lines += path.read_text(encoding="utf-8", errors="replace").splitlines()
    shown = lines if last is None else lines[len(lines) - min(last, len(lines)) :]
    output.write_out("\n".join([f"== {title}", *map(output.printable, shown or ["(no lines)"])]))
