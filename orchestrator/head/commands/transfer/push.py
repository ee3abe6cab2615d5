"""`orchestrator push`: send a directory or a file to all nodes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.common import text
from orchestrator.common.folder import IS_DIRECTORY
from orchestrator.head.commands.machines.exec import Chosen
from orchestrator.head.commands.transfer.outcome import exit_code, in_lines
from orchestrator.head.screen import output
from orchestrator.head.screen.progress import Progress
from orchestrator.head.transfer import push as pushing
from orchestrator.head.transfer.push import Cargo, Pushed


@dataclass(frozen=True)
class PushOptions:
    """The options of `orchestrator push`, as they were typed."""

    chosen: Chosen
    source: Path
    destination: str | None = None
    dry_run: bool = False
    as_json: bool = False


def push(options: PushOptions) -> int:
    """Send what the nodes lack; say what each was sent."""
    targets = options.chosen.numbered()
    cargo = pushing.load(options.source, options.destination)
    progress = Progress("sending", 0)
    progress.tty = progress.tty and not options.as_json
    transport = options.chosen.transport()
    notes: list[str] = []
    parts = pushing.push(
        transport, targets, cargo, progress, dry_run=options.dry_run, say=notes.append
    )
    progress.clear()
    incomplete = any(part.failed for part in parts)
    code = exit_code([part.error for part in parts], incomplete=incomplete)
    if options.as_json:
        shown = [as_json(part, cargo) for part in parts]
        data = {
            "nodes": shown,
            "left_out": cargo.left_out,
            "notes": notes,
            "exit_code": code,
        }
        output.tell(json.dumps(data, indent=1))
    else:
        output.tell(as_text(parts, cargo, notes, dry_run=options.dry_run))
    return code


def as_json(part: Pushed, cargo: Cargo) -> dict[str, Any]:
    return {
        "node": part.target.index,
        "name": part.target.node.name,
        "into": cargo.directory,
        "sent": part.sent,
        "kept": part.kept,
        "bytes": part.size,
        "failed": part.failed,
        "problem": part.error.what if part.error else "",
        "fix": part.error.fix if part.error else "",
    }


def as_text(parts: Sequence[Pushed], cargo: Cargo, said: Sequence[str], *, dry_run: bool) -> str:
    """Draw what each node was sent, and name what it was not."""
    rows: list[list[output.Cell]] = [["NODE", "NAME", "SENT", "SIZE", "THERE BEFORE", "INTO"]]
    notes = list(said)
    for part in parts:
        label, name = part.target.label, part.target.node.name
        if part.error is not None:
            rows.append([label, name, ("-", "red"), "", "", ""])
            notes += in_lines(label, part.error)
            continue
        count = f"{len(part.sent)}" + " to go" * dry_run
        size = "" if dry_run else text.size(part.size)
        rows.append([label, name, count, size, f"{part.kept}", cargo.directory])
        notes += [f"{label}: {path}: {why}" for path, why in part.failed.items()]
    if cargo.tree.names and any(IS_DIRECTORY in part.failed.values() for part in parts):
        into = f"{cargo.directory.rstrip('/')}/{os.fsdecode(cargo.tree.entries[0].path)}/"
        notes.append(f"  -> to put the file into that directory, write a / at the end: {into}")
    notes += [f"left out: {what}" for what in cargo.left_out]
    table = output.table(rows, output.terminal(), headed=True)
    return "\n".join([table, *map(output.printable, notes)])
