"""`orchestrator pull` and `push`: files between this machine and all nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from orchestrator.common import text
from orchestrator.common.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NODE,
    UsageError,
)
from orchestrator.common.folder import IS_DIRECTORY, Folder
from orchestrator.head.commands.machines.exec import Chosen, directory_on
from orchestrator.head.connect.channel import Declined
from orchestrator.head.connect.transport import Transport
from orchestrator.head.nodes.node_list import NumberedNode
from orchestrator.head.schedulers.backend import backend_of
from orchestrator.head.screen import failures, output, styles
from orchestrator.head.screen.events import event_listener
from orchestrator.head.screen.output import Column, Table, Terminal
from orchestrator.head.screen.progress import ProgressBar
from orchestrator.head.transfer import pull as pulling
from orchestrator.head.transfer import push as pushing
from orchestrator.head.transfer.push import Cargo
from orchestrator.head.transfer.tree import Moved
from orchestrator.protocol.requests.transfer import ListPath, Outputs
from orchestrator.protocol.timing import FILES_ANSWER_SECONDS
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment

# -- what went to or came from each node ----------------------------------------------------------


def to_json(part: Moved, verb: str) -> dict[str, Any]:
    return {
        "node": part.node,
        "name": part.name,
        "into": part.into,
        verb: part.files,
        "kept": part.kept,
        "bytes": part.size,
        "failed": part.failed,
        "problem": part.error.what if part.error else "",
        "fix": part.error.fix if part.error else "",
    }


def to_text(
    parts: Sequence[Moved], verb: str, before: str, later: str, terminal: Terminal
) -> tuple[str, list[str]]:
    """Return the table of each node's transfer, and notes on missing files.

    In a dry run, `later` is appended to the number of files.
    """
    columns: Table[Moved] = Table(
        (
            Column("NODE", label_of, absent=label_of),
            Column("NAME", lambda part: part.name, absent=lambda part: part.name, least=10),
            Column(
                verb.upper(),
                lambda part: f"{len(part.files)}{later}",
                absent=lambda _: ("-", styles.FAILED),
            ),
            Column("SIZE", lambda part: "" if later else text.format_bytes(part.size)),
            Column(before, lambda part: str(part.kept), drop=1),
            Column("INTO", lambda part: part.into, least=16),
        ),
        is_absent=lambda part: part.error is not None,
    )
    notes = failures.failure_lines(
        (label_of(part), part.error.what, part.error.fix) for part in parts if part.error
    )
    for part in parts:
        notes += [f"{label_of(part)}: {path}: {reason}" for path, reason in part.failed.items()]
        notes += [f"{label_of(part)}: left out: {what}" for what in part.left_out]
    return columns.text(parts, terminal), notes


def label_of(part: Moved) -> str:
    return f"node{part.node}"


def exit_code(parts: Sequence[Moved]) -> int:
    """Return 4 if a node could not be reached, 1 if one refused or not all files have come.

    A UsageError is about this machine: a DST that cannot be made.
    """
    failed = [part.error for part in parts if part.error is not None]
    if any(not isinstance(error, (Declined, UsageError)) for error in failed):
        return EXIT_NODE
    return EXIT_FAILED if failed or any(part.failed for part in parts) else EXIT_DONE


def joined(table: str, notes: Sequence[str]) -> str:
    return "\n".join([table, *map(output.printable_text, notes)])


# -- pull -----------------------------------------------------------------------------------------


def pull_files(
    chosen: Chosen,
    wanted: str | None,
    destination: Path | None,
    *,
    checkpoints: bool,
    dry_run: bool,
) -> int:
    """Fetch a job's files from its nodes, or a path of all nodes; print each node's result.

    `wanted` is an experiment, or a path of the nodes.
    """
    where = chosen.where
    experiment = experiments.find_experiment(where, wanted)
    if wanted is None and experiment is None:
        raise UsageError(
            f"there is no experiment in {where.experiments}",
            "name a path of the nodes: orchestrator pull /data/results DST",
        )
    if experiment is not None:
        transport, sources = of_experiment(chosen, experiment, destination, checkpoints)
    elif checkpoints:
        raise experiments.missing_experiment(where, wanted)
    else:
        transport, sources = chosen.transport(), of_path(chosen, str(wanted), destination)
    with ProgressBar("fetching") as progress:
        parts = pulling.pull_sources(transport, sources, progress, dry_run=dry_run)
    code = exit_code(parts)

    def as_text(terminal: Terminal) -> str:
        later = " to come" * dry_run
        return joined(*to_text(parts, "fetched", "HERE BEFORE", later, terminal))

    nodes = [{**to_json(part, "fetched"), "left_out": part.left_out} for part in parts]
    data = {"nodes": nodes, "exit_code": code}
    output.print_result(data, as_text)
    declined = any(isinstance(part.error, Declined) for part in parts)
    if experiment is None and declined and "/" not in str(wanted):
        missing = experiments.missing_experiment(where, wanted)
        output.complain(f"{wanted!r} was taken for a path: {missing}")
    return code


def of_experiment(
    chosen: Chosen, experiment: Experiment, destination: Path | None, checkpoints: bool
) -> tuple[Transport, list[pulling.PullSource]]:
    """Return the transport of a job, and a source for each of its chosen nodes.

    Without a destination, the files go into the experiment's own directory.
    """
    record = experiment.read_record()
    experiment.check_launched(record)
    seconds = max(chosen.connect_timeout, record.launch.connect_timeout)
    transport = backend_of(record).transport(record, chosen.where.ssh_config, seconds)
    wanted = set(chosen.nodes)
    named = {node.index: {str(node.index), node.name, node.host} for node in record.nodes}
    if unknown := wanted.difference(*named.values()):
        fix = f"orchestrator status {experiment.name} lists its nodes"
        raise UsageError(f"--node {min(unknown)}: the job had no such node", fix)
    outputs = Folder(experiment.path / "outputs", private=True)
    sources = []
    for node in record.nodes:
        if wanted and not wanted & named[node.index]:
            continue
        into = outputs
        if destination is not None:
            into = Folder(destination / experiment.log(node).stem, private=False)
        question = Outputs(
            job=record.job,
            part=node.part,
            own=node.index > 0,
            checkpoints=checkpoints,
            beside=FILES_ANSWER_SECONDS / 2,
        )
        sources.append(
            pulling.PullSource(node.index, node.name, node, question, into, into is not outputs)
        )
    return transport, sources


def of_path(chosen: Chosen, wanted: str, destination: Path | None) -> list[pulling.PullSource]:
    """Return a source for each chosen node of the list; each node's files get a directory here."""
    name = PurePosixPath(wanted).name
    if name in ("", ".", "..", "~"):
        raise UsageError(f"{wanted} does not end in the name of a file or directory")
    return [
        pulling.PullSource(
            target.index,
            target.node.name,
            target.node,
            ListPath(path=wanted, directory=directory_on(target, None).path),
            Folder((destination or Path()) / directory_of(target), private=False),
            replace=True,
        )
        for target in chosen.numbered()
    ]


def directory_of(target: NumberedNode) -> str:
    """Name the directory here of a node's files as its logs are named."""
    host = re.sub(r"[^A-Za-z0-9_.%-]", "-", target.node.host)
    return f"node_{target.index}_{host}"


# -- push -----------------------------------------------------------------------------------------


def push_files(chosen: Chosen, source: Path, destination: str | None, *, dry_run: bool) -> int:
    """Send the files that the nodes lack; print each node's result."""
    targets = chosen.numbered()
    cargo = pushing.load_cargo(source, destination)
    transport = chosen.transport()
    said: list[str] = []
    with (
        ProgressBar("sending", nodes=len(targets)) as progress,
        event_listener(draw=lambda event: said.append(event.words())),
    ):
        parts = pushing.push_cargo(transport, targets, cargo, progress, dry_run=dry_run)
    code = exit_code(parts)

    def as_text(terminal: Terminal) -> str:
        later = " to go" * dry_run
        table, notes = to_text(parts, "sent", "THERE BEFORE", later, terminal)
        return joined(table, [*said, *notes, *notes_on(cargo, parts)])

    nodes = [to_json(part, "sent") for part in parts]
    data = {"nodes": nodes, "left_out": cargo.left_out, "notes": said, "exit_code": code}
    output.print_result(data, as_text)
    return code


def notes_on(cargo: Cargo, parts: Sequence[Moved]) -> list[str]:
    """Return notes on a push: skipped files, and how to write a destination directory."""
    notes = [f"left out: {what}" for what in cargo.left_out]
    if cargo.tree.names and any(IS_DIRECTORY in part.failed.values() for part in parts):
        into = f"{cargo.directory.rstrip('/')}/{os.fsdecode(cargo.tree.entries[0].path)}/"
        notes.insert(0, f"  -> to put the file into that directory, write a / at the end: {into}")
    return notes
