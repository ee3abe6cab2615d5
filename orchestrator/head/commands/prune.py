"""`orchestrator prune`: which experiments go, and why the others stay.

choose() decides, and knows nothing but what it is given. Around it: reading the directory, asking
the nodes, the table, the question. prune/remove.py removes experiments, prune/node_runs.py what
nodes have of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NODE,
    EXIT_STOPPED,
    OrchestratorError,
    UsageError,
    nearest,
)
from orchestrator.head.commands import checkpoints
from orchestrator.head.prune import remove as removal
from orchestrator.head.prune.remove import InTheWay
from orchestrator.head.prune.report import (
    conclude,
    foreign,
    print_out,
    show,
    table,
    tell,
    told_json,
)
from orchestrator.head.prune.scan import OVER, Found, Plan, scan, settled
from orchestrator.head.slurm import queue
from orchestrator.records.checkpoint_store import shown
from orchestrator.records.experiment import Experiment, JobRecord

AGE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(.*)", re.DOTALL)
UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
LONG_UNITS = {"minutes": "m", "hours": "h", "days": "d", "weeks": "w"}
BATCH = 100  # experiments held at a time; each takes two file descriptors


@dataclass(frozen=True)
class Rules:
    """What the user asked for. older_than is in seconds."""

    keep: int
    older_than: float = 0.0
    keep_failed: bool = False


# -- choosing ---------------------------------------------------------------------------------


def choose(
    experiments: Sequence[Found], now: float, rules: Rules
) -> list[tuple[Found, str | None]]:
    """Every entry, the newest first, and why it is kept; None: it goes.

    The newest `keep` are counted over all experiments, whatever became of them.
    """
    ours = [one for one in experiments if one.record is not None]
    ours.sort(key=lambda one: (one.when, one.name), reverse=True)
    found = [(one, reason(one, place, now, rules)) for place, one in enumerate(ours)]
    return [*found, *((one, one.foreign) for one in experiments if one.record is None)]


def reason(one: Found, place: int, now: float, rules: Rules) -> str | None:
    assert one.record is not None
    if place < rules.keep:
        return "it is the newest" if rules.keep == 1 else f"among the newest {rules.keep}"
    if now - one.when < rules.older_than:
        return "it is not old enough"
    if one.pinned:
        return "pinned"
    if one.busy:
        return one.busy
    if rules.keep_failed and one.record.state not in ("done", "stopped"):
        return (
            one.record.state
            if one.record.state in OVER
            else "how it ended is not known: orchestrator attach"
        )
    return None


def seconds(text: str) -> float:
    """14d, 36h, 90m, 2w."""
    found = AGE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"--older-than {text}: not a time", "write it like 14d, 36h, 90m or 2w")
    number, unit = found.groups()
    if unit not in UNITS:
        near = nearest(unit, [*UNITS, *LONG_UNITS])
        for name in (*LONG_UNITS, *UNITS):
            near = near.replace(f"{name!r}", repr(number + LONG_UNITS.get(name, name)))
        what = f"there is no unit {unit!r}" if unit else "the unit is missing"
        raise UsageError(
            f"--older-than {text}: {what}{near}",
            "the units are m (minutes), h (hours), d (days), w (weeks)",
        )
    return float(number) * UNITS[unit]


# -- deciding ---------------------------------------------------------------------------------


def decide(root: int, options: Mapping[str, Any], rules: Rules) -> Plan:
    found, hidden = scan(root)
    now, place = time.time(), options["experiments"].absolute()
    on_nodes = bool(options["on_nodes"])
    first = [one for one, why in choose(found, now, rules) if why is None]
    used = {one.name: removal.in_use(root, one.name) for one in first}
    for one in first:
        used[one.name] = used[one.name] or in_queue(place / one.name, one.record)
    to_ask = [
        one.record
        for one in first
        if one.record and not used[one.name] and (on_nodes or not settled(one.record))
        if one.record.slurm_job is None and not one.record.batch
    ]
    plan = Plan(place, [], hidden, on_nodes)
    if to_ask:
        from orchestrator.head.prune import node_runs  # paramiko takes 0.1 s

        known = node_runs.survey(to_ask, options["ssh_config"])
        for one in first:
            assert one.record is not None
            used[one.name] = used[one.name] or runs(one.record, known)
            for node in one.record.nodes:
                if (one.record.job, node.index) in known.unreached and on_nodes:
                    plan.unreached[node.name] = known.unreached[one.record.job, node.index]
    plan.decided = choose([replace(one, busy=used.get(one.name, "")) for one in found], now, rules)
    for name in [one.name for one in plan.going] + hidden:
        plan.measured[name] = removal.measure(root, name, place / name)
    return plan


def in_queue(path: Path, record: JobRecord | None) -> str:
    """Why a job on nodes of Slurm's must be taken for running, if so."""
    if record is None or settled(record):
        return ""
    job = record.slurm_job or Experiment(path).slurm_job()
    if job is None:
        return ""
    try:
        found = queue.place(job)
    except OrchestratorError as error:
        return f"its record says {record.state}, and Slurm cannot be asked: {error.what}"
    return "" if found.over else f"it is Slurm's job {job}: {found}"


def runs(record: JobRecord, known: Any) -> str:
    """Why it must be taken for running, if so. A record that says it is over needs no proof."""
    for node in record.nodes:
        if (record.job, node.index) in known.living:
            return f"it runs, on node {node.index} ({node.name})"
    for node in record.nodes:
        if record.state not in OVER and (record.job, node.index) in known.unreached:
            why = known.unreached[record.job, node.index]
            return f"its record says {record.state}, and {node.name} cannot be asked: {why}"
    return ""


# -- the command ------------------------------------------------------------------------------


def prune(options: dict[str, Any]) -> int:
    if options["pin"] or options["unpin"]:
        return pins(options)
    if options["names"]:
        raise UsageError(f"{options['names'][0]!r}: names go with --pin or --unpin")
    if options["list_all"]:
        return listed(options)
    if options["keep"] is None:
        raise UsageError(
            "it is not said how many to keep",
            "orchestrator prune --keep N; --keep 0 --older-than 14d goes by age alone",
        )
    # Without a FILE behind it, --nodes is what it looks like here.
    options = {**options, "on_nodes": options["on_nodes"] or options["nodes"] == ""}
    age = options["older_than"]
    rules = Rules(options["keep"], seconds(age) if age else 0.0, options["keep_failed"])
    with opened(options) as root:
        if root is None:
            tell(options, f"nothing to remove: there is no directory {options['experiments']}")
            told_json(options, Plan(options["experiments"].absolute(), [], []))
            return EXIT_DONE
        plan = decide(root, options, rules)
        if not options["as_json"]:
            show(plan, verbose=options["verbose"])
        if options["dry_run"] or not (plan.going or plan.hidden):
            told_json(options, plan)
            return EXIT_DONE
        if not (options["yes"] or agreed(options)):
            tell(options, "nothing was removed")
            return EXIT_STOPPED
        remove(root, plan, options["ssh_config"])
    told_json(options, plan)
    conclude(options, plan)
    return exit_code(plan)


@contextlib.contextmanager
def opened(options: Mapping[str, Any]) -> Iterator[int | None]:
    """The experiments directory; the one path that may be a link, because the user named it."""
    path = options["experiments"]
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


def agreed(options: Mapping[str, Any]) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("nothing was removed: nobody can be asked here", "add --yes to mean it")
    where = ", here and on their nodes" if options["on_nodes"] else ""
    sys.stderr.write(f"remove them{where}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# -- removing ---------------------------------------------------------------------------------


def remove(root: int, plan: Plan, ssh_config: Path | None) -> None:
    total = sum(found.size for found in plan.measured.values())
    progress = checkpoints.Progress("removing", total)
    for hidden in plan.hidden:
        attempt(plan, hidden, partial(removal.finish, root, hidden, progress.add))
    going = plan.going
    for start in range(0, len(going), BATCH):
        remove_batch(root, plan, going[start : start + BATCH], ssh_config, progress)
    progress.clear()


def remove_batch(
    root: int,
    plan: Plan,
    batch: Sequence[Found],
    ssh_config: Path | None,
    progress: checkpoints.Progress,
) -> None:
    held = {}
    for one in batch:
        if plan.measured[one.name].obstacle:
            plan.failed[one.name] = plan.measured[one.name].obstacle
            continue
        with kept_in_words(plan, one.name):
            held[one.name] = removal.hold(root, one.name, one.identity)
    try:
        if plan.on_nodes:
            clean_nodes(plan, [one for one in batch if one.name in held], ssh_config)
        for name, lock in held.items():
            if name in plan.failed or name in plan.spared:
                continue
            attempt(plan, name, partial(removal.take, root, lock, progress.add))
    finally:
        for lock in held.values():
            lock.release()


def attempt(plan: Plan, name: str, work: Callable[[], list[str]]) -> None:
    with kept_in_words(plan, name):
        problems = work()
        if problems:
            more = f", and {len(problems) - 1} more" if problems[1:] else ""
            plan.failed[name] = f"some of it could not be deleted: {problems[0]}{more}"
            return
        plan.removed.add(name)
        plan.freed += plan.measured[name].size


@contextlib.contextmanager
def kept_in_words(plan: Plan, name: str) -> Iterator[None]:
    try:
        yield
    except InTheWay as why:
        plan.spared[name] = str(why)
    except FileNotFoundError:
        plan.spared[name] = "somebody else has removed it"
    except OSError as error:
        plan.failed[name] = f"{error.strerror}, in {shown(plan.directory)}"


def clean_nodes(plan: Plan, batch: Sequence[Found], ssh_config: Path | None) -> None:
    """What these jobs left on their nodes, before their records go.

    The record is the only place that says which nodes had a part in a job: it stays until all of
    them were cleaned, else what is on the others would never be found again. A job whose record
    was copied to an experiment that stays keeps what it has there.
    """
    from orchestrator.head.prune import node_runs

    shared = {one.record.job for one, why in plan.decided if why is not None and one.record}
    mine = [one for one in batch if one.record and one.record.job not in shared]
    done = node_runs.remove([one.record for one in mine if one.record], ssh_config)
    plan.freed_on_nodes += done.freed
    for one in mine:
        assert one.record is not None
        for node in one.record.nodes:
            run = (one.record.job, node.index)
            if run in done.unreached:
                plan.unreached[node.name] = done.unreached[run]
            problem = done.unreached.get(run) or done.problems.get(run)
            if problem:
                plan.failed.setdefault(one.name, f"on node {node.name}: {problem}")


def exit_code(plan: Plan) -> int:
    if plan.unreached:
        return EXIT_NODE
    return EXIT_FAILED if plan.failed else EXIT_DONE


# -- pins -------------------------------------------------------------------------------------


def pins(options: Mapping[str, Any]) -> int:
    """All of the names, or none: an unknown one is told before anything is done."""
    if options["pin"] and options["unpin"]:
        raise UsageError("--pin and --unpin cannot go together")
    if not options["names"]:
        raise UsageError("which experiments?", "orchestrator prune --pin NAME...")
    with opened(options) as root:
        found = scan(root)[0] if root is not None else []
        known = {one.name for one in found if one.record is not None}
        names = [name.rstrip("/") for name in options["names"]]
        for name in names:
            if name not in known:
                there = f"there is no experiment {name!r} in {shown(options['experiments'])}"
                raise UsageError(there + nearest(name, known))
        for name in names:
            assert root is not None
            try:
                removal.pin(root, name, wanted=options["pin"])
            except OSError as error:
                raise UsageError(f"{shown(name)}: {error.strerror}") from error
    words = "pinned" if options["pin"] else "not pinned any more"
    if options["as_json"]:
        print_out(json.dumps({"pinned" if options["pin"] else "unpinned": names}, indent=1))
    for name in names:
        tell(options, f"{shown(name)}: {words}")
    return EXIT_DONE


def listed(options: Mapping[str, Any]) -> int:
    """All experiments, the newest first; nothing is asked, nothing goes."""
    with opened(options) as root:
        found = scan(root)[0] if root is not None else []
        plan = Plan(options["experiments"].absolute(), choose(found, 0.0, Rules(len(found))), [])
        for one, _ in plan.decided:
            if root is not None and one.record is not None:
                path = plan.directory / one.name
                plan.measured[one.name] = removal.measure(root, one.name, path)
    if not options["as_json"]:
        table(plan, [one for one, _ in plan.decided if one.record is not None])
        foreign(plan, verbose=options["verbose"])
    told_json(options, plan)
    return EXIT_DONE
