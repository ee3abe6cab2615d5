"""`orchestrator prune`: which experiments go, and why the others stay.

Reads the directory, asks the nodes, shows the table, and asks. head/prune/choice.py chooses,
head/prune/remove.py removes experiments, head/prune/node_runs.py what nodes have of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.common import text
from orchestrator.common.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NODE,
    EXIT_STOPPED,
    OrchestratorError,
    UsageError,
    nearest,
)
from orchestrator.config.launch import Where
from orchestrator.head.prune import remove as removal
from orchestrator.head.prune.choice import Rules, choose
from orchestrator.head.prune.remove import InTheWay
from orchestrator.head.prune.report import conclusion, foreign, show, table, to_json
from orchestrator.head.prune.scan import OVER, PrunePlan, ScannedExperiment, scan, settled
from orchestrator.head.schedulers import queue
from orchestrator.head.screen import output
from orchestrator.head.screen.progress import Progress
from orchestrator.records.checkpoint_store import shown
from orchestrator.records.experiment import TRUST, Experiment, JobRecord

BATCH = 100  # experiments held at a time; each takes two file descriptors


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
    as_json: bool = False

    @property
    def directory(self) -> Path:
        return self.where.experiments.absolute()


# -- deciding ---------------------------------------------------------------------------------


def decide(root: int, options: PruneOptions, rules: Rules) -> PrunePlan:
    """Choose by the rules, ask about those that would go, and choose again."""
    entries, hidden = scan(root, trusted=options.where.trust_record)
    now, directory, on_nodes = time.time(), options.directory, options.on_nodes
    first = [entry for entry, why in choose(entries, now, rules) if why is None]
    busy = {
        entry.name: removal.in_use(root, entry.name)
        or in_queue(directory / entry.name, entry.record)
        or unasked(entry, on_nodes=on_nodes)
        for entry in first
    }
    to_ask = [
        entry.record
        for entry in first
        if entry.record and not busy[entry.name] and (on_nodes or not settled(entry.record))
        if entry.launched_here and not entry.record.scheduled
    ]
    plan = PrunePlan(directory, [], hidden, on_nodes)
    if to_ask:
        from orchestrator.head.prune import node_runs  # paramiko takes 0.1 s

        survey = node_runs.survey(to_ask, options.where.ssh_config)
        for entry in first:
            assert entry.record is not None
            busy[entry.name] = busy[entry.name] or runs(entry.record, survey)
            for node in entry.record.nodes:
                if (entry.record.job, node.index) in survey.unreached and on_nodes:
                    plan.unreached[node.name] = survey.unreached[entry.record.job, node.index]
    asked = [replace(entry, busy=busy.get(entry.name, "")) for entry in entries]
    plan.decided = choose(asked, now, rules)
    for name in [entry.name for entry in plan.going] + hidden:
        plan.measured[name] = removal.measure(root, name, directory / name)
    return plan


def in_queue(path: Path, record: JobRecord | None) -> str:
    """Return why a job of Slurm's must be taken for running, or nothing."""
    if record is None or settled(record):
        return ""
    job = record.slurm_job or Experiment(path).slurm_job()
    if job is None:
        return ""
    try:
        entry = queue.look_up(job)
    except OrchestratorError as error:
        return f"its record says {record.state}, and Slurm cannot be asked: {error.what}"
    return "" if entry.over else f"it is Slurm's job {job}: {entry}"


def runs(record: JobRecord, survey: Any) -> str:
    """Return why a job must be taken for running, or nothing; one recorded as over need not be."""
    for node in record.nodes:
        if (record.job, node.index) in survey.living:
            return f"it runs, on node {node.index} ({node.name})"
    for node in record.nodes:
        if record.state not in OVER and (record.job, node.index) in survey.unreached:
            why = survey.unreached[record.job, node.index]
            return f"its record says {record.state}, and {node.name} cannot be asked: {why}"
    return ""


# -- the command ------------------------------------------------------------------------------


def prune(options: PruneOptions) -> int:
    """Remove the experiments that the options select, or list, pin or unpin some."""
    if options.pin or options.unpin:
        return pins(options)
    if options.names:
        raise UsageError(f"{options.names[0]!r}: names go with --pin or --unpin")
    if options.list_all:
        return listed(options)
    if options.keep is None:
        raise UsageError(
            "say how many experiments to keep",
            "orchestrator prune --keep N; --keep 0 --older-than 14d removes by age alone",
        )
    age = options.older_than
    older_than = text.parse_seconds("--older-than", age) if age else 0.0
    rules = Rules(options.keep, older_than, options.keep_failed)
    experiments = options.where.experiments
    with opened(experiments) as root:
        if root is None:
            tell(options, f"nothing to remove: there is no directory {experiments}")
            tell_json(options, PrunePlan(options.directory, [], []))
            return EXIT_DONE
        plan = decide(root, options, rules)
        if not options.as_json:
            show(plan, verbose=options.verbose)
        if options.dry_run or not (plan.going or plan.hidden):
            tell_json(options, plan)
            return EXIT_DONE
        if not (options.yes or agreed(on_nodes=options.on_nodes)):
            tell(options, "nothing was removed")
            return EXIT_STOPPED
        remove(root, plan, options.where.ssh_config)
    tell_json(options, plan)
    tell(options, conclusion(plan))
    if plan.unreached:
        return EXIT_NODE
    return EXIT_FAILED if plan.failed else EXIT_DONE


def tell(options: PruneOptions, message: str) -> None:
    if not options.as_json:
        output.tell(message)


def tell_json(options: PruneOptions, plan: PrunePlan) -> None:
    if options.as_json:
        output.tell(to_json(plan, dry_run=options.dry_run))


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
    output.complain(f"remove them{where}? [y/N] ", end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# -- removing ---------------------------------------------------------------------------------


def remove(root: int, plan: PrunePlan, ssh_config: Path | None) -> None:
    """Remove what the plan selects, and note in the plan how each removal ended."""
    total = sum(measured.size for measured in plan.measured.values())
    progress = Progress("removing", total)
    for hidden in plan.hidden:
        attempt(plan, hidden, partial(removal.finish, root, hidden, progress.add))
    going = plan.going
    for start in range(0, len(going), BATCH):
        remove_batch(root, plan, going[start : start + BATCH], ssh_config, progress)
    progress.clear()


def remove_batch(
    root: int,
    plan: PrunePlan,
    batch: Sequence[ScannedExperiment],
    ssh_config: Path | None,
    progress: Progress,
) -> None:
    held = {}
    for entry in batch:
        if plan.measured[entry.name].obstacle:
            plan.failed[entry.name] = plan.measured[entry.name].obstacle
            continue
        with noted(plan, entry.name):
            held[entry.name] = removal.hold(root, entry.name, entry.identity)
    try:
        if plan.on_nodes:
            clean_nodes(plan, [entry for entry in batch if entry.name in held], ssh_config)
        for name, lock in held.items():
            if name in plan.failed or name in plan.spared:
                continue
            attempt(plan, name, partial(removal.take, root, lock, progress.add))
    finally:
        for lock in held.values():
            lock.release()


def attempt(plan: PrunePlan, name: str, work: Callable[[], list[str]]) -> None:
    with noted(plan, name):
        problems = work()
        if problems:
            more = f", and {len(problems) - 1} more" if problems[1:] else ""
            plan.failed[name] = f"some of it could not be deleted: {shown(problems[0])}{more}"
            return
        plan.removed.add(name)
        plan.freed += plan.measured[name].size


@contextlib.contextmanager
def noted(plan: PrunePlan, name: str) -> Iterator[None]:
    """Note in the plan why an experiment could not be removed."""
    try:
        yield
    except InTheWay as why:
        plan.spared[name] = str(why)
    except FileNotFoundError:
        plan.spared[name] = "another process has removed it"
    except OSError as error:
        plan.failed[name] = f"{error.strerror}, in {shown(plan.directory)}"


def unasked(entry: ScannedExperiment, *, on_nodes: bool) -> str:
    """Say why the nodes of a job are not asked whether it still runs, where they would have to."""
    assert entry.record is not None
    if entry.launched_here or entry.record.scheduled:
        return ""
    if entry.record.state in OVER and not (on_nodes and entry.record.nodes):
        return ""
    return f"this login did not launch it: its nodes are not asked ({TRUST} asks them)"


def clean_nodes(
    plan: PrunePlan, batch: Sequence[ScannedExperiment], ssh_config: Path | None
) -> None:
    """Remove what these jobs left on their nodes, before their records are removed.

    Only the record says which nodes a job ran on: it stays until all of them were cleaned, or the
    rest would never be found again. A job whose record was also copied to an experiment that stays
    keeps its files on the nodes.
    """
    from orchestrator.head.prune import node_runs

    shared = {entry.record.job for entry, why in plan.ours if why is not None and entry.record}
    records = {
        entry.name: entry.record
        for entry in batch
        if entry.record and entry.record.job not in shared
    }
    result = node_runs.remove(list(records.values()), ssh_config)
    plan.freed_on_nodes += result.freed
    for name, record in records.items():
        for node in record.nodes:
            run = (record.job, node.index)
            if run in result.unreached:
                plan.unreached[node.name] = result.unreached[run]
            problem = result.unreached.get(run) or result.problems.get(run)
            if problem:
                plan.failed.setdefault(name, f"on node {node.name}: {problem}")


# -- pins -------------------------------------------------------------------------------------


def pins(options: PruneOptions) -> int:
    """Pin or unpin all of the names, or none: an unknown one is refused before anything is done."""
    if options.pin and options.unpin:
        raise UsageError("--pin and --unpin cannot go together")
    if not options.names:
        raise UsageError("which experiments?", "orchestrator prune --pin NAME...")
    with opened(options.where.experiments) as root:
        trusted = options.where.trust_record
        entries = scan(root, trusted=trusted)[0] if root is not None else []
        known = {entry.name for entry in entries if entry.record is not None}
        names = [name.rstrip("/") for name in options.names]
        for name in names:
            if name not in known:
                there = f"there is no experiment {name!r} in {shown(options.where.experiments)}"
                raise UsageError(there + nearest(name, known))
        for name in names:
            assert root is not None
            try:
                removal.pin(root, name, wanted=options.pin)
            except OSError as error:
                raise UsageError(f"{shown(name)}: {error.strerror}") from error
    change = "pinned" if options.pin else "not pinned any more"
    if options.as_json:
        output.tell(json.dumps({"pinned" if options.pin else "unpinned": names}, indent=1))
    for name in names:
        tell(options, f"{shown(name)}: {change}")
    return EXIT_DONE


def listed(options: PruneOptions) -> int:
    """List all experiments, the newest first, without asking a node or removing anything."""
    with opened(options.where.experiments) as root:
        trusted = options.where.trust_record
        entries = scan(root, trusted=trusted)[0] if root is not None else []
        decided = choose(entries, 0.0, Rules(len(entries)))
        plan = PrunePlan(options.directory, decided, [])
        for entry, _ in plan.ours:
            assert root is not None
            path = plan.directory / entry.name
            plan.measured[entry.name] = removal.measure(root, entry.name, path)
    if not options.as_json:
        table(plan, [entry for entry, _ in plan.ours])
        foreign(plan, verbose=options.verbose)
    tell_json(options, plan)
    return EXIT_DONE
