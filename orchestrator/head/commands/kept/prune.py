"""`orchestrator prune`: remove old experiments; pin or unpin some.

The choice is head/prune/entries.py, the removal head/prune/remove.py; here are the words and the
question.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from orchestrator.head.prune.entries import (
    FAILED,
    KEPT,
    REMOVED,
    SELECTED,
    Entry,
    Removable,
    choose,
    keep_busy,
    measure,
    pin,
    scan,
)
from orchestrator.head.prune.remove import Removal
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
    verbose: bool = False


def prune(options: PruneOptions) -> int:
    """Remove the experiments that the options select, or pin or unpin some."""
    if options.pin and options.unpin:
        raise UsageError("--pin and --unpin cannot go together")
    changes_pins = options.pin or options.unpin
    if options.names and not changes_pins:
        raise UsageError(f"{options.names[0]!r}: names go with --pin or --unpin")
    if options.keep is None and not changes_pins:
        raise UsageError(
            "say how many experiments to keep",
            "orchestrator prune --keep N; --keep 0 --older-than 14d removes by age alone",
        )
    age = parse_seconds("--older-than", options.older_than) if options.older_than else 0.0
    path = options.where.experiments
    if not path.exists() and not changes_pins:
        say(f"nothing to remove: there is no directory {path}")
        return EXIT_DONE
    with opened(path) as root:
        return pins(options, root) if changes_pins else remove(options, root, age)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open the experiments directory, which may be a link, because the user named it."""
    try:
        root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{shown(path)} cannot be read: {error.strerror}") from error
    try:
        yield root
    finally:
        os.close(root)


def remove(options: PruneOptions, root: int, age: float) -> int:
    """Show what goes by the options, ask, and remove it."""
    where, directory = options.where, options.where.experiments.absolute()
    entries, foreign, hidden = scan(root, trusted=where.trust_record)
    removal = Removal(root, directory, where.ssh_config, options.on_nodes)
    leftovers = [Removable(name) for name in hidden]
    choose(entries, time.time(), options.keep or 0, age, keep_failed=options.keep_failed)
    removal.unreached = keep_busy(root, entries, where.ssh_config, on_nodes=options.on_nodes)
    going: list[Removable] = [*leftovers, *(one for one in entries if one.action == SELECTED)]
    for one in going:
        measure(root, one, directory / one.name)
    if not output.as_json():
        show(options, entries, leftovers, foreign, removal)
    only_shown = options.dry_run or not going
    if not only_shown:
        if not (options.yes or agreed(on_nodes=options.on_nodes)):
            say("nothing was removed")
            return EXIT_STOPPED
        with Progress("removing", sum(one.size for one in going)) as progress:
            removal.seen = progress.add
            removal.go(entries, leftovers)
        if not output.as_json():
            conclude(going, removal)
    if output.as_json():
        data = to_json(directory, entries, leftovers, foreign, removal)
        output.write_out(json.dumps({**data, "dry_run": options.dry_run}, indent=1))
    if only_shown:
        return EXIT_DONE
    if removal.unreached:
        return EXIT_NODE
    return EXIT_FAILED if any(one.action == FAILED for one in going) else EXIT_DONE


def agreed(*, on_nodes: bool) -> bool:
    """Ask on the terminal."""
    if not sys.stdin.isatty():
        raise UsageError(
            "nothing was removed: there is no terminal to ask on", "confirm with --yes"
        )
    where = ", here and on their nodes" if on_nodes else ""
    return output.agreed(f"remove them{where}?")


def pins(options: PruneOptions, root: int) -> int:
    """Pin or unpin all of the names, or none: an unknown one is refused before anything is done."""
    if not options.names:
        raise UsageError("which experiments?", "orchestrator prune --pin NAME...")
    known = [entry.name for entry in scan(root, trusted=options.where.trust_record)[0]]
    names = [name.rstrip("/") for name in options.names]
    for name in names:
        if name not in known:
            there = f"there is no experiment {name!r} in {shown(options.where.experiments)}"
            raise UsageError(there + nearest(name, known))
    for name in names:
        try:
            pin(root, name, wanted=options.pin)
        except OSError as error:
            raise UsageError(f"{shown(name)}: {error.strerror}") from error
    if output.as_json():
        output.write_out(json.dumps({"pinned" if options.pin else "unpinned": names}, indent=1))
    for name in names:
        say(f"{shown(name)}: {'pinned' if options.pin else 'not pinned any more'}")
    return EXIT_DONE


# -- words ------------------------------------------------------------------------------------


def say(message: str) -> None:
    if not output.as_json():
        output.write_out(message)


def show(
    options: PruneOptions,
    entries: Sequence[Entry],
    leftovers: Sequence[Removable],
    foreign: Mapping[str, str],
    removal: Removal,
) -> None:
    """Print what would be removed, and what stays although the rules select it."""
    going = [entry for entry in entries if entry.action != KEPT]
    if going:
        rows: list[list[output.Cell]] = [["experiment", "state", "when", "size", ""]]
        for entry in going:
            state = shown(entry.record.state)
            cell, pin = (state, STATES.get(state, "")), "pinned" if entry.pinned else ""
            rows.append([shown(entry.name), cell, clock(entry)[:16], size(entry.size), pin])
        say(output.table(rows, output.terminal(), right={3}, headed=True))
    for one in leftovers:
        say(f"{shown(one.name)}: left by a prune that was interrupted, {size(one.size)}")
    for entry in entries:
        if entry.action == FAILED:
            say(f"cannot be removed: {shown(entry.name)}: {entry.reason}")
        elif entry.action == KEPT and (options.verbose or entry.busy):
            say(f"kept: {shown(entry.name)}: {entry.reason}")
    for name, reason in foreign.items() if options.verbose else ():
        say(f"not ours: {shown(name)}: {reason}")
    for node, reason in removal.unreached.items():
        say(f"not reached: {shown(node)}: {reason}")
    if going or leftovers:
        total = sum(one.size for one in (*going, *leftovers))
        say(f"{plural(len(going), 'experiment')}, {size(total)}")
    else:
        count = plural(len(entries), "experiment")
        say(f"nothing to remove: {count} in {shown(removal.directory)}")


def clock(entry: Entry) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.when))


def conclude(going: Sequence[Removable], removal: Removal) -> None:
    """Print the outcome."""
    for one in going:
        if one.action in (KEPT, FAILED):
            word = "kept" if one.action == KEPT else "NOT REMOVED"
            say(f"{word}: {shown(one.name)}: {one.reason}")
    gone = sum(isinstance(one, Entry) and one.action == REMOVED for one in going)
    summary = f"removed {plural(gone, 'experiment')}, {size(freed(going))} freed"
    if removal.on_nodes:
        summary += f" here and {size(removal.freed_on_nodes)} on their nodes"
    elif gone:
        summary += "; what they left on their nodes stays there (--on-nodes removes that too)"
    say(summary)


def freed(going: Sequence[Removable]) -> int:
    return sum(one.size for one in going if one.action == REMOVED)


def to_json(
    directory: Path,
    entries: Sequence[Entry],
    leftovers: Sequence[Removable],
    foreign: Mapping[str, str],
    removal: Removal,
) -> dict[str, object]:
    """Return all that is known of the experiments, and what became of each."""
    return {
        "directory": str(directory),
        "experiments": [
            {
                **of(entry),
                "state": entry.record.state,
                "when": clock(entry),
                "pinned": entry.pinned,
            }
            for entry in entries
        ],
        "left_over": [of(one) for one in leftovers],
        "not_ours": [{"name": name, "reason": reason} for name, reason in foreign.items()],
        "nodes_not_cleaned": removal.unreached,
        "freed": freed([*entries, *leftovers]),
        "freed_on_nodes": removal.freed_on_nodes,
    }


def of(one: Removable) -> dict[str, object]:
    return {
        "name": one.name,
        "size": one.size or None,
        "action": one.action,
        "reason": one.reason or None,
    }
