"""`orchestrator ls`: list the jobs of this directory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from orchestrator.common.errors import EXIT_DONE
from orchestrator.common.text import format_duration, plural
from orchestrator.config.launch import Where
from orchestrator.head.commands.sweep import journal
from orchestrator.head.screen import output, styles
from orchestrator.head.screen.output import Cell, Column, Table, Terminal
from orchestrator.head.status import row, status
from orchestrator.head.status.row import Row
from orchestrator.protocol.message import encode_value
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, JobRecord

# Without --all, only this many jobs are listed.
USUALLY = 20


def state_of(row: Row) -> Cell:
    stalled = (f"{row.state}, {row.stalled}", styles.WARNING)
    usual = (row.state, styles.STATES.get(row.state, ""))
    return stalled if row.stalled and row.state == "running" else usual


def step_of(row: Row) -> str:
    known = row.progress
    return "-" if known.step is None else f"{known.step}" + f"/{known.steps}" * bool(known.steps)


def loss_of(row: Row) -> Cell:
    if row.progress.lost:
        return "NaN", styles.FAILED
    return "-" if row.progress.loss is None else f"{row.progress.loss:.4g}"


def left_of(row: Row) -> str:
    known = row.ended is None and row.progress.left is not None
    return format_duration(round(row.progress.left or 0.0)) if known else "-"


def age_of(row: Row) -> str:
    return format_duration(max(1, round(time.time() - row.started))) if row.started else "-"


COLUMNS: tuple[Column[Row], ...] = (
    Column("JOB", lambda row: row.name, least=20),
    Column("STATE", state_of),
    Column("STEP", step_of, right=True, drop=1),
    Column("LOSS", loss_of, right=True, drop=2),
    Column("LEFT", left_of, right=True, drop=4),
    Column("NODES", lambda row: str(row.nodes), right=True, drop=7),
    Column("AGE", age_of, right=True, drop=6),
    Column("COMMAND", lambda row: row.command or "-", drop=3, least=16),
    Column(
        "NOTE",
        lambda row: (
            "; ".join(filter(None, (" ".join(row.tags), row.note, row.cause))),
            styles.DIM,
        ),
        drop=5,
        least=16,
    ),
)


def list_jobs(where: Where, *, running: bool, every: bool, tags: Sequence[str] = ()) -> int:
    """List the newest jobs, those that run, those with tags.

    Nodes are asked only where a record may be old.
    """
    known = experiments.list_experiments(where)[::-1]
    if running:
        left = {each.path for each, _ in experiments.unfinished_experiments(where)}
        known = [each for each in known if each.path in left]
    if tags:
        known = [each for each in known if set(tags) <= set(tags_of(each))]
    shown = known if every or running else known[:USUALLY]
    rows = [
        row for row in map(partial(row_of, where=where), shown) if not running or row.ended is None
    ]

    def words(terminal: Terminal) -> str:
        if not rows:
            tagged = f" tagged {' and '.join(tags)}" if tags else ""
            what = "no job runs" if running else "there is no job"
            return f"{what}{tagged} in {output.short_path(where.experiments.absolute())}"
        columns = (*COLUMNS[:4], *columns_of_sweep(rows, where), *COLUMNS[4:])
        lines = [Table(columns).text(rows, terminal)]
        if more := len(known) - len(shown):
            lines.append(f"and {plural(more, 'older job')}: orchestrator ls --all")
        return "\n".join(lines)

    output.print_result([encode_value(row) for row in rows], words)
    return EXIT_DONE


def to_text(jobs: Sequence[Experiment]) -> str:
    """Return the table of the newest of these jobs by their records, the newest first."""
    return Table(COLUMNS).text([row_of(each, None) for each in jobs[: -USUALLY - 1 : -1]])


def columns_of_sweep(rows: Sequence[Row], where: Where) -> list[Column[Row]]:
    """Return a column for each value that varies, if all rows are members of one sweep."""
    tags = set.intersection(*(set(row.tags) for row in rows))
    sweeps = filter(None, (journal.find_journal(where.experiments, tag) for tag in tags))
    members = {str(state.member): state.values for sweep in sweeps for state in sweep.read()}
    names = dict.fromkeys(name for values in members.values() for name in values)
    return [Column(name, partial(value_of, members, name), drop=2, least=8) for name in names]


def value_of(members: Mapping[str, Mapping[str, str]], name: str, row: Row) -> str:
    """Return a value of a member, whose experiment is NAME-NUMBER_DATE_TIME."""
    return members.get(row.name.rsplit("_", 2)[0].rpartition("-")[2], {}).get(name, "-")


def tags_of(experiment: Experiment) -> Sequence[str]:
    try:
        return experiment.read_record().launch.tag
    except row.TROUBLE:
        return ()


def row_of(experiment: Experiment, where: Where | None) -> Row:
    """Return the row of a job by its record; with `where`, its nodes are asked if it may be old."""
    try:
        record = experiment.read_record()
        found = row.row_of(experiment, record)
        if record.over or where is None:
            return found
        return asked(found, experiment, record, where)
    except row.TROUBLE as error:
        return row.damaged_row(experiment.name, error)


def asked(found: Row, experiment: Experiment, record: JobRecord, where: Where) -> Row:
    """Return the row with the job's state on its nodes, as its head may have been killed."""
    certainty = status.run_certainty(experiment, record, where)
    if certainty == status.NOT:
        return replace(found, state="ended", cause=f"its result: orchestrator attach {found.name}")
    attempt = f"attempt {found.attempt}" if found.attempt > 1 else ""
    return replace(
        found, cause=attempt if certainty == status.SURELY else "its nodes do not answer"
    )
