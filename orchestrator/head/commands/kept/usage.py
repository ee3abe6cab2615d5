"""`orchestrator usage`: what jobs took of the machines, by user, project or month."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from orchestrator.common.errors import EXIT_DONE
from orchestrator.common.text import parse_seconds
from orchestrator.config.launch import Where
from orchestrator.head.screen import output
from orchestrator.head.screen.output import Column, Table, Terminal
from orchestrator.head.status.row import TROUBLE, damaged
from orchestrator.head.status.usage import Total, Usage, of, totals
from orchestrator.records import experiments
from orchestrator.records.experiment import RECORD, STAMP

SHOWN = 5  # experiments that are not counted


def amount(total: Total, name: str, digits: int = 1) -> str:
    """Write an amount: `?` is what nobody measured, `12.5+?` is that for some jobs."""
    known = total.known[name]
    words = "" if known is None else f"{known:.{digits}f}"
    return "+".join(filter(None, [words, "?" * bool(total.unknown[name])]))


COLUMNS: tuple[Column[Total], ...] = (
    Column("JOBS", lambda one: str(one.jobs), right=True),
    Column("GPU HOURS", lambda one: amount(one, "gpu_hours"), right=True),
    Column("SLOT HOURS", lambda one: amount(one, "slot_hours"), right=True),
    Column("GPU KWH", lambda one: amount(one, "energy_kwh", 2), right=True),
    Column("USEFUL", lambda one: "?" if one.goodput is None else f"{one.goodput:.0%}", right=True),
)


def usage(
    where: Where, directories: Sequence[Path], *, by: str, since: str | None, as_json: bool
) -> int:
    begin = time.time() - parse_seconds("--since", since) if since else 0.0
    usages, unread = read([where.experiments, *directories], begin, time.time())
    found = totals(usages, by)
    data = {
        "by": by,
        "totals": [asdict(one) for one in found],
        "unread": [{"experiment": str(path), "problem": why} for path, why in unread],
    }
    output.result(data, partial(to_text, found, by, unread), as_json=as_json)
    return EXIT_DONE


def read(
    roots: Sequence[Path], begin: float, now: float
) -> tuple[list[Usage], list[tuple[Path, str]]]:
    """Read all experiments that began since then. Whoever wrote one: nothing in it is run."""
    usages, unread = list[Usage](), list[tuple[Path, str]]()
    for root in dict.fromkeys(path.absolute() for path in roots):
        unread += closed(root)
        for experiment in experiments.every(root, trusted=True):
            try:
                if (experiments.stamped(experiment.name[-15:]) or now) >= begin:
                    usages.append(of(experiment, now))
            except TROUBLE as error:
                unread.append((experiment.path, damaged(experiment.name, error).cause))
    return usages, unread


def closed(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield what this login may not look into: the directory, or experiments of others in it."""
    try:
        for path in sorted(root.iterdir()):
            if STAMP.fullmatch(path.name):
                try:
                    (path / RECORD).stat()
                except PermissionError as error:
                    yield path, str(error.strerror)
                except OSError:
                    continue
    except FileNotFoundError:
        return
    except OSError as error:
        yield root, error.strerror or "unreadable"


def to_text(
    found: Sequence[Total], by: str, unread: Sequence[tuple[Path, str]], terminal: Terminal
) -> str:
    columns = (Column[Total](by.upper(), lambda one: one.name), *COLUMNS)
    table = Table(columns).text(found, terminal) if found else "there is no job"
    lines = [f"not counted: {output.path(path)}: {why}" for path, why in unread]
    more = len(lines) - SHOWN
    lines[SHOWN:] = [f"not counted: {more} more: --json names them"] if more > 0 else []
    return "\n".join([table, *lines])
