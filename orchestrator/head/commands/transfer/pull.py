"""`orchestrator pull`: fetch what a job left on its nodes, or a path of all nodes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from orchestrator.common import text
from orchestrator.common.errors import UsageError
from orchestrator.common.folder import Folder
from orchestrator.head.commands.machines.exec import Chosen, directory
from orchestrator.head.commands.transfer.outcome import exit_code, in_lines
from orchestrator.head.connect.channel import Declined
from orchestrator.head.connect.transport import Transport
from orchestrator.head.nodes.node_list import NumberedNode
from orchestrator.head.screen import output
from orchestrator.head.screen.progress import Progress
from orchestrator.head.status.backend import backend_of
from orchestrator.head.transfer.fetch import pull as pulling
from orchestrator.protocol.requests.transfer import Files, Outputs
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment


@dataclass(frozen=True)
class PullOptions:
    """The options of `orchestrator pull`, as they were typed."""

    chosen: Chosen
    wanted: str | None = None  # an experiment, or a path of the nodes
    destination: Path | None = None
    checkpoints: bool = False
    dry_run: bool = False
    as_json: bool = False


def pull(options: PullOptions) -> int:
    """Fetch what a job left on its nodes, or a path of all nodes; say what came from each."""
    where, wanted = options.chosen.where, options.wanted
    experiment = experiments.find(where.experiments, wanted, trusted=where.trust_record)
    if wanted is None and experiment is None:
        raise UsageError(
            f"there is no experiment in {where.experiments}",
            "name a path of the nodes: orchestrator pull /data/results DST",
        )
    if experiment is not None:
        transport, sources = of_experiment(options, experiment)
    elif options.checkpoints:
        raise experiments.missing(where.experiments, wanted)
    else:
        transport, sources = options.chosen.transport(), of_path(options)
    progress = Progress("fetching", 0)
    progress.tty = progress.tty and not options.as_json
    parts = pulling.pull(transport, sources, progress, dry_run=options.dry_run)
    progress.clear()
    incomplete = any(part.result.failed for part in parts)
    code = exit_code([part.error for part in parts], incomplete=incomplete)
    if options.as_json:
        shown = [pulled_as_json(part) for part in parts]
        output.tell(json.dumps({"nodes": shown, "exit_code": code}, indent=1))
    else:
        output.tell(pulled_as_text(parts, dry_run=options.dry_run))
        if experiment is None and any(isinstance(part.error, Declined) for part in parts):
            hint_at_experiment(where.experiments, wanted or "")
    return code


def hint_at_experiment(root: Path, wanted: str) -> None:
    """Say that a word was taken for a path of the nodes, where it may be a misspelt experiment."""
    if "/" not in wanted:
        output.complain(f"{wanted!r} was taken for a path: {experiments.missing(root, wanted)}")


def of_experiment(
    options: PullOptions, experiment: Experiment
) -> tuple[Transport, list[pulling.Source]]:
    """Ask the nodes of a job; without a DST its files go into its own directory here."""
    chosen = options.chosen
    record = experiment.read_record()
    experiment.check_launched(record)
    transport = backend_of(record).transport(record, chosen.where.ssh_config)
    wanted = set(chosen.nodes)
    known = {word for node in record.nodes for word in (str(node.index), node.name, node.host)}
    if wanted - known:
        fix = f"orchestrator status {experiment.name} lists its nodes"
        raise UsageError(f"--node {min(wanted - known)}: the job had no such node", fix)
    outputs = Folder(experiment.path / "outputs", private=True)
    sources = []
    for node in record.nodes:
        if wanted and not wanted & {str(node.index), node.name, node.host}:
            continue
        into = outputs
        if options.destination is not None:
            into = Folder(options.destination / experiment.log(node).stem, private=False)
        question = Outputs(
            job=record.job,
            node=node.index,
            checkpoints=options.checkpoints,
            beside=pulling.LIST_SECONDS / 2,
        )
        sources.append(
            pulling.Source(node.index, node.name, node, question, into, into is not outputs)
        )
    return transport, sources


def of_path(options: PullOptions) -> list[pulling.Source]:
    """Ask the nodes of the list for a path; each one's files go into a directory of its own."""
    assert options.wanted is not None
    name = PurePosixPath(options.wanted).name
    if name in ("", ".", "..", "~"):
        raise UsageError(f"{options.wanted} has no name that its copy here could have")
    destination = options.destination or Path()
    sources = []
    for target in options.chosen.numbered():
        base = directory(target, None).path
        into = destination / directory_of(target)
        sources.append(
            pulling.Source(
                *(target.index, target.node.name, target.node),
                Files(path=options.wanted, directory=base),
                Folder(into, private=False),
                replace=True,
            )
        )
    return sources


def directory_of(target: NumberedNode) -> str:
    """Name a node's own directory here as its logs are named."""
    host = re.sub(r"[^A-Za-z0-9_.%-]", "-", target.node.host)
    return f"node_{target.index}_{host}"


def pulled_as_json(part: pulling.Pulled) -> dict[str, Any]:
    result = part.result
    return {
        "node": part.source.index,
        "name": part.source.name,
        "into": str(part.source.into.root),
        "fetched": result.fetched,
        "kept": result.kept,
        "bytes": result.size,
        "failed": result.failed,
        "left_out": result.left_out,
        "problem": part.error.what if part.error else "",
        "fix": part.error.fix if part.error else "",
    }


def pulled_as_text(parts: Sequence[pulling.Pulled], *, dry_run: bool) -> str:
    """Draw what came from each node, and name what did not."""
    terminal = output.terminal()
    rows: list[list[output.Cell]] = [["NODE", "NAME", "FETCHED", "SIZE", "HERE BEFORE", "INTO"]]
    notes = []
    for part in parts:
        label, result = f"node{part.source.index}", part.result
        if part.error is not None:
            rows.append([label, part.source.name, ("-", "red"), "", "", ""])
            notes += in_lines(label, part.error)
            continue
        count = f"{len(result.fetched)}" + " to come" * dry_run
        numbers = [count, "" if dry_run else text.size(result.size), f"{result.kept}"]
        rows.append([label, part.source.name, *numbers, str(part.source.into.root)])
        notes += [f"{label}: {path}: {why}" for path, why in result.failed.items()]
        notes += [f"{label}: left out: {what}" for what in result.left_out]
    return "\n".join([output.table(rows, terminal, headed=True), *map(output.printable, notes)])
