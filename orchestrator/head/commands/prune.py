"""`orchestrator prune`: show which old experiments go, ask, and remove them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence

from orchestrator.common.errors import EXIT_DONE, EXIT_FAILED, EXIT_NODE, EXIT_STOPPED, UsageError
from orchestrator.common.text import format_bytes, parse_seconds, plural
from orchestrator.config.launch import Where
from orchestrator.head.prune.removal import (
    FAILED,
    KEPT,
    REMOVED,
    SELECTED,
    PruneEntry,
    Removable,
    Removal,
    keep_busy,
    mark_kept,
    measure_directory,
    scan_experiments,
)
from orchestrator.head.screen import output, styles
from orchestrator.head.screen.output import write_out
from orchestrator.head.screen.progress import ProgressBar
from orchestrator.records.checkpoint_store import shown_name


def prune_experiments(
    where: Where,
    keep: int | None,
    older_than: str | None,
    *,
    keep_failed: bool,
    on_nodes: bool,
    dry_run: bool,
    yes: bool,
) -> int:
    """Remove the experiments that the options select."""
    if keep is None:
        raise UsageError(
            "say how many experiments to keep",
            "orchestrator prune --keep N; --keep 0 --older-than 14d removes by age alone",
        )
    age = parse_seconds("--older-than", older_than) if older_than else 0.0
    directory = where.experiments.absolute()
    if not directory.exists():
        write_out(f"nothing to remove: there is no directory {where.experiments}")
        return EXIT_DONE
    # O_NOFOLLOW is not used: the user named this path, and it may be a symbolic link.
    try:
        root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(
            f"{shown_name(where.experiments)} cannot be read: {error.strerror}"
        ) from error
    removal = Removal(root, directory, where.ssh_config, on_nodes)
    try:
        entries, foreign, leftovers = scan_experiments(root, where)
        mark_kept(entries, time.time(), keep, age, keep_failed=keep_failed)
        code = remove(removal, entries, leftovers, dry_run=dry_run, yes=yes)
    finally:
        os.close(root)
    output.print_result({**to_json(entries, leftovers, foreign, removal), "dry_run": dry_run})
    return code


def remove(
    removal: Removal,
    entries: Sequence[PruneEntry],
    leftovers: Sequence[Removable],
    *,
    dry_run: bool,
    yes: bool,
) -> int:
    """Show the selected experiments, ask for confirmation, and remove them."""
    removal.unreached = keep_busy(
        removal.root, entries, removal.ssh_config, on_nodes=removal.on_nodes
    )
    going: list[Removable] = [*leftovers, *(one for one in entries if one.action == SELECTED)]
    for one in going:
        measure_directory(removal.root, one, removal.directory / one.name)
    show(entries, leftovers, removal)
    if dry_run or not going:
        return EXIT_DONE
    if not (yes or agreed(on_nodes=removal.on_nodes)):
        write_out("nothing was removed")
        return EXIT_STOPPED
    with ProgressBar("removing", sum(one.size for one in going)) as progress:
        removal.seen = progress.add
        removal.go(entries, leftovers)
    conclude(going, removal)
    if removal.unreached:
        return EXIT_NODE
    return EXIT_FAILED if any(one.action == FAILED for one in going) else EXIT_DONE


def agreed(*, on_nodes: bool) -> bool:
    """Return True if the user confirms the removal on the terminal."""
    if not sys.stdin.isatty():
        raise UsageError(
            "nothing was removed: there is no terminal to ask on", "confirm with --yes"
        )
    where = ", here and on their nodes" if on_nodes else ""
    return output.user_agrees(f"remove them{where}?")


# -- words ------------------------------------------------------------------------------------


def show(entries: Sequence[PruneEntry], leftovers: Sequence[Removable], removal: Removal) -> None:
    """Print what would be removed, and what stays although the rules select it."""
    going = [entry for entry in entries if entry.action != KEPT]
    if going:
        rows: list[list[output.Cell]] = [["experiment", "state", "when", "size"]]
        for entry in going:
            state = shown_name(entry.record.state)
            cell = state, styles.STATES.get(state, "")
            rows.append([shown_name(entry.name), cell, clock(entry)[:16], format_bytes(entry.size)])
        write_out(output.format_table(rows, output.terminal_of(), right={3}, headed=True))
    for one in leftovers:
        write_out(
            f"{shown_name(one.name)}: left by a prune that was interrupted,"
            f" {format_bytes(one.size)}"
        )
    for entry in entries:
        if entry.action == FAILED or entry.busy:
            word = "cannot be removed" if entry.action == FAILED else "kept"
            write_out(f"{word}: {shown_name(entry.name)}: {entry.reason}")
    for node, reason in removal.unreached.items():
        write_out(f"not reached: {shown_name(node)}: {reason}")
    total = format_bytes(sum(one.size for one in (*going, *leftovers)))
    none = (
        f"nothing to remove: {plural(len(entries), 'experiment')}"
        f" in {shown_name(removal.directory)}"
    )
    write_out(f"{plural(len(going), 'experiment')}, {total}" if going or leftovers else none)


def clock(entry: PruneEntry) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.when))


def conclude(going: Sequence[Removable], removal: Removal) -> None:
    """Print the outcome."""
    for one in going:
        if word := {KEPT: "kept", FAILED: "NOT REMOVED"}.get(one.action):
            write_out(f"{word}: {shown_name(one.name)}: {one.reason}")
    gone = sum(isinstance(one, PruneEntry) and one.action == REMOVED for one in going)
    summary = f"removed {plural(gone, 'experiment')}, {format_bytes(freed(going))} freed"
    if removal.on_nodes:
        summary += f" here and {format_bytes(removal.freed_on_nodes)} on their nodes"
    elif gone:
        summary += "; what they left on their nodes stays there (--on-nodes removes that too)"
    write_out(summary)


def freed(going: Sequence[Removable]) -> int:
    return sum(one.size for one in going if one.action == REMOVED)


def to_json(
    entries: Sequence[PruneEntry],
    leftovers: Sequence[Removable],
    foreign: Mapping[str, str],
    removal: Removal,
) -> dict[str, object]:
    """Return all that is known of the experiments, and what became of each."""

    def of(one: Removable) -> dict[str, object]:
        return {
            "name": one.name,
            "size": one.size or None,
            "action": one.action,
            "reason": one.reason or None,
        }

    return {
        "directory": str(removal.directory),
        "experiments": [
            {**of(one), "state": one.record.state, "when": clock(one), "pinned": one.pinned}
            for one in entries
        ],
        "left_over": [of(one) for one in leftovers],
        "not_ours": [{"name": name, "reason": reason} for name, reason in foreign.items()],
        "nodes_not_cleaned": removal.unreached,
        "freed": freed([*entries, *leftovers]),
        "freed_on_nodes": removal.freed_on_nodes,
    }
