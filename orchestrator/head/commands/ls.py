"""`orchestrator ls`: list the jobs of this directory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.common.errors import EXIT_DONE
from orchestrator.common.text import format_duration, plural
from orchestrator.config.launch import Where
from orchestrator.head.screen import output, styles
from orchestrator.head.screen.output import Cell, Column, Table, Terminal
from orchestrator.head.status import row, status
from orchestrator.head.status.row import Row
from orchestrator.protocol.message import encode_value
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, JobRecord

# Without --all, only this many jobs are listed.
USUALLY = 20
COMMAND_CHARACTERS, NOTE_CHARACTERS, CAUSE_CHARACTERS = 40, 60, 120


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


def note_of(row: Row) -> str:
    words = (" ".join(row.tags), row.note[:NOTE_CHARACTERS], row.cause[:CAUSE_CHARACTERS])
    return "; ".join(filter(None, words))


COLUMNS: tuple[Column[Row], ...] = (
    Column("JOB", lambda row: row.name),
    Column("STATE", state_of),
    Column("STEP", step_of, right=True),
    Column("LOSS", loss_of, right=True),
    Column("LEFT", left_of, right=True),
    Column("NODES", lambda row: str(row.nodes), right=True),
    Column("AGE", age_of, right=True),
    Column("COMMAND", lambda row: row.command[:COMMAND_CHARACTERS] or "-", drop=2),
    Column("NOTE", lambda row: (note_of(row), styles.DIM), drop=1),
)


def list_jobs(where: Where, *, running: bool, every: bool, tags: Sequence[str] = ()) -> int:
    """List the newest jobs, those that run, those with tags.

    Nodes are asked only where a record may be old.
    """
    known = experiments.list_experiments(where)[::-1]
    if running:
        left = {each.path for each in experiments.unfinished_experiments(where)}
        known = [each for each in known if each.path in left]
    if tags:
        known = [each for each in known if set(tags) <= set(tags_of(each))]
    shown = known if every or running else known[:USUALLY]
    rows = [row_of(each, where) for each in shown]
    rows = [row for row in rows if not running or row.ended is None]
    more = len(known) - len(shown)

    def words(terminal: Terminal) -> str:
        if not rows:
            what = "no job runs" if running else "there is no job"
            what += f" tagged {' and '.join(tags)}" if tags else ""
            return f"{what} in {output.short_path(where.experiments.absolute())}"
        lines = [Table(COLUMNS).fitted(rows, terminal.width).text(rows, terminal)]
        if more:
            lines.append(f"and {plural(more, 'older job')}: orchestrator ls --all")
        return "\n".join(lines)

    output.print_result([encode_value(row) for row in rows], words)
    return EXIT_DONE


def tags_of(experiment: Experiment) -> Sequence[str]:
    try:
        return experiment.read_record().launch.tag
    except row.TROUBLE:
        return ()


def row_of(experiment: Experiment, where: Where) -> Row:
    try:
        record = experiment.read_record()
        found = row.row_of(experiment, record)
        return found if record.over else asked(found, experiment, record, where)
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
