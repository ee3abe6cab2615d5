"""`orchestrator prune`: remove old experiments; list, pin or unpin some.

The choice is head/prune/plan.py, the removal head/prune/remove.py; here are the words and the
question.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.common.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NODE,
    EXIT_STOPPED,
    UsageError,
    nearest,
)
from orchestrator.common.text import parse_seconds, plural, size
from orchestrator.config.launch import Where
from orchestrator.head.prune.plan import (
    Entry,
    Plan,
    Rules,
    Scan,
    choose,
    decide,
    measure,
    pin,
    scan,
)
from orchestrator.head.prune.remove import FAILED, KEPT, REMOVED, Removal
from orchestrator.head.screen import output
from orchestrator.head.screen.progress import Progress
from orchestrator.records.checkpoint_store import shown

STATES = {"done": "green", "failed": "red", "lost": "red"}


@dataclass(frozen=True)
class PruneOptions:
    """The options of `prune`."""

    where: Where
    names: tuple[str, ...] = ()
    keep: int | None = None
    older_than: str | None = None
    keep_failed: bool = False
    on_nodes: bool = False
    dry_run: bool = False
    yes: bool = False
    pin: bool = False
    unpin: bool = False
    list_all: bool = False
    verbose: bool = False

    @property
    def directory(self) -> Path:
        return self.where.experiments.absolute()

    @property
    def rules(self) -> Rules:
        if self.keep is None:
            raise UsageError(
                "say how many experiments to keep",
                "orchestrator prune --keep N; --keep 0 --older-than 14d removes by age alone",
            )
        age = self.older_than
        seconds = parse_seconds("--older-than", age) if age else 0.0
        return Rules(self.keep, seconds, self.keep_failed)


def prune(options: PruneOptions) -> int:
    """Remove the experiments that the options select, or list, pin or unpin some."""
    if options.pin or options.unpin:
        return pins(options)
    if options.names:
        raise UsageError(f"{options.names[0]!r}: names go with --pin or --unpin")
    if options.list_all:
        return listed(options)
    where, rules = options.where, options.rules
    with opened(where.experiments) as root:
        if root is None:
            report(options, f"nothing to remove: there is no directory {where.experiments}")
            return concluded(options, Removal(-1, Plan(options.directory)))
        plan = decide(
            root,
            options.directory,
            rules,
            trusted=where.trust_record,
            ssh_config=where.ssh_config,
            on_nodes=options.on_nodes,
        )
        removal = Removal(root, plan, where.ssh_config)
        if not output.as_json():
            show(plan, verbose=options.verbose)
        if options.dry_run or not plan.measured:
            return concluded(options, removal)
        if not (options.yes or agreed(on_nodes=options.on_nodes)):
            report(options, "nothing was removed")
            return EXIT_STOPPED
        with Progress("removing", total(plan)) as progress:
            removal.go(progress.add)
    report(options, conclusion(removal))
    return concluded(options, removal)


def concluded(options: PruneOptions, removal: Removal) -> int:
    if output.as_json():
        output.write_out(to_json(removal, dry_run=options.dry_run))
    if not removal.outcomes:
        return EXIT_DONE
    if removal.unreached or removal.plan.unreached:
        return EXIT_NODE
    return EXIT_FAILED if removal.ended(FAILED) else EXIT_DONE


def report(options: PruneOptions, message: str) -> None:
    if not output.as_json():
        output.write_out(message)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int | None]:
    """Open the experiments directory, which may be a link, because the user named it."""
    try:
        root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        raise UsageError(f"{shown(path)} cannot be read: {error.strerror}") from error
    try:
        yield root
    finally:
        os.close(root)


def agreed(*, on_nodes: bool) -> bool:
    """Ask on the terminal."""
    if not sys.stdin.isatty():
        raise UsageError(
            "nothing was removed: there is no terminal to ask on", "confirm with --yes"
        )
    where = ", here and on their nodes" if on_nodes else ""
    return output.agreed(f"remove them{where}?")


# -- pins, and the list -----------------------------------------------------------------------


def pins(options: PruneOptions) -> int:
    """Pin or unpin all of the names, or none: an unknown one is refused before anything is done."""
    if options.pin and options.unpin:
        raise UsageError("--pin and --unpin cannot go together")
    if not options.names:
        raise UsageError("which experiments?", "orchestrator prune --pin NAME...")
    with opened(options.where.experiments) as root:
        known = [entry.name for entry in content_of(root, options).entries]
        names = [name.rstrip("/") for name in options.names]
        for name in names:
            if name not in known:
                there = f"there is no experiment {name!r} in {shown(options.where.experiments)}"
                raise UsageError(there + nearest(name, known))
        for name in names:
            assert root is not None
            try:
                pin(root, name, wanted=options.pin)
            except OSError as error:
                raise UsageError(f"{shown(name)}: {error.strerror}") from error
    change = "pinned" if options.pin else "not pinned any more"
    if output.as_json():
        output.write_out(json.dumps({"pinned" if options.pin else "unpinned": names}, indent=1))
    for name in names:
        report(options, f"{shown(name)}: {change}")
    return EXIT_DONE


def listed(options: PruneOptions) -> int:
    """List all experiments, the newest first, without asking a node or removing anything."""
    with opened(options.where.experiments) as root:
        content, directory = content_of(root, options), options.directory
        decided = choose(content.entries, 0.0, Rules(len(content.entries)))
        measured = {
            entry.name: measure(root, entry.name, directory / entry.name)
            for entry, _ in decided
            if root is not None
        }
    plan = Plan(directory, decided, content, measured=measured)
    if not output.as_json():
        table(plan, [entry for entry, _ in decided])
        foreign(plan, verbose=options.verbose)
    return concluded(options, Removal(-1, plan))


def content_of(root: int | None, options: PruneOptions) -> Scan:
    return Scan() if root is None else scan(root, trusted=options.where.trust_record)


# -- words ------------------------------------------------------------------------------------


def show(plan: Plan, *, verbose: bool) -> None:
    """Print what would be removed, and what stays although the rules select it."""
    going, hidden = plan.going, plan.scan.hidden
    if going:
        table(plan, going)
    for name in hidden:
        left = size(plan.measured[name].size)
        output.write_out(f"{shown(name)}: left by a prune that was interrupted, {left}")
    for entry in going:
        if obstacle := plan.measured[entry.name].obstacle:
            output.write_out(f"cannot be removed: {shown(entry.name)}: {obstacle}")
    for entry, reason in plan.decided:
        if reason is not None and (verbose or entry.name in plan.busy):
            output.write_out(f"kept: {shown(entry.name)}: {reason}")
    foreign(plan, verbose=verbose)
    for node, reason in plan.unreached.items():
        output.write_out(f"not reached: {shown(node)}: {reason}")
    if going or hidden:
        output.write_out(f"{plural(len(going), 'experiment')}, {size(total(plan))}")
    else:
        count = plural(len(plan.decided), "experiment")
        output.write_out(f"nothing to remove: {count} in {shown(plan.directory)}")


def total(plan: Plan) -> int:
    return sum(measured.size for measured in plan.measured.values())


def foreign(plan: Plan, *, verbose: bool) -> None:
    for name, reason in plan.scan.foreign.items() if verbose else ():
        output.write_out(f"not ours: {shown(name)}: {reason}")


def table(plan: Plan, entries: Sequence[Entry]) -> None:
    rows: list[list[output.Cell]] = [["experiment", "state", "when", "size", ""]]
    for entry in entries:
        state, pin = shown(entry.record.state), "pinned" if entry.pinned else ""
        cell = (state, STATES.get(state, ""))
        measured = size(plan.measured[entry.name].size)
        rows.append([shown(entry.name), cell, clock(entry)[:16], measured, pin])
    output.write_out(output.table(rows, output.terminal(), right={3}, headed=True))


def clock(entry: Entry) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.when))


def conclusion(removal: Removal) -> str:
    """Return the outcome."""
    lines = [f"kept: {shown(name)}: {reason}" for name, reason in removal.ended(KEPT).items()]
    lines += [
        f"NOT REMOVED: {shown(name)}: {reason}" for name, reason in removal.ended(FAILED).items()
    ]
    gone = len([entry for entry in removal.plan.going if entry.name in removal.ended(REMOVED)])
    summary = f"removed {plural(gone, 'experiment')}, {size(removal.freed)} freed"
    if removal.plan.on_nodes:
        summary += f" here and {size(removal.freed_on_nodes)} on their nodes"
    elif gone:
        summary += "; what they left on their nodes stays there (--on-nodes removes that too)"
    return "\n".join([*lines, summary])


def to_json(removal: Removal, *, dry_run: bool) -> str:
    """Return all that is known of the experiments, and what became of each."""
    plan = removal.plan
    whole = {
        "directory": str(plan.directory),
        "dry_run": dry_run,
        "experiments": [about(removal, entry, reason) for entry, reason in plan.decided],
        "left_over": [
            {"name": name, "size": plan.measured[name].size, **outcome(removal, name)}
            for name in plan.scan.hidden
        ],
        "not_ours": [
            {"name": name, "reason": reason} for name, reason in plan.scan.foreign.items()
        ],
        "nodes_not_cleaned": {**plan.unreached, **removal.unreached},
        "freed": removal.freed,
        "freed_on_nodes": removal.freed_on_nodes,
    }
    return json.dumps(whole, indent=1)


def about(removal: Removal, entry: Entry, reason: str | None) -> dict[str, Any]:
    measured = removal.plan.measured.get(entry.name)
    kept = {"action": KEPT, "reason": reason}
    return {
        "name": entry.name,
        "state": entry.record.state,
        "when": clock(entry),
        "size": measured.size if measured else None,
        "pinned": entry.pinned,
        **(outcome(removal, entry.name) if reason is None else kept),
    }


def outcome(removal: Removal, name: str) -> dict[str, Any]:
    action, reason = removal.outcomes.get(name, ("", removal.plan.measured[name].obstacle))
    return {
        "action": action or (FAILED if reason else "would be removed"),
        "reason": reason or None,
    }
