"""`orchestrator report`: write one HTML page of an experiment, or of several side by side."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from orchestrator.common import files
from orchestrator.common.errors import EXIT_DONE, UsageError
from orchestrator.common.text import format_bytes
from orchestrator.config.launch import Where
from orchestrator.head.commands.sweep import journal as journals
from orchestrator.head.screen.events import say
from orchestrator.head.status import comparison
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment
from orchestrator.views.report import members, page, run_data

NAME = "report.html"
# More lines in one chart cannot be told apart.
MOST_LINES = 8


def report(where: Where, wanted: Sequence[str], *, out: Path | None, opened: bool) -> int:
    sweep = journals.find_journal(where.experiments, wanted[0]) if len(wanted) == 1 else None
    if sweep is not None:
        text = page.page_of_members(members.read_members(sweep))
        return deliver(Experiment(sweep.path), text, out or sweep.path / NAME, opened=opened)
    if len(wanted) > MOST_LINES:
        raise UsageError(f"{len(wanted)} experiments do not fit on one page: at most {MOST_LINES}")
    # None is the newest experiment.
    names: Sequence[str | None] = [*dict.fromkeys(wanted)] or [None]
    chosen = [experiments.require_experiment(where, name) for name in names]
    reports = [run_data.read_run_data(experiment, len(chosen) - 1) for experiment in chosen]
    differences = comparison.compare_experiments(chosen) if len(chosen) > 1 else {}
    text = page.report_page(reports, differences)
    if out is None:
        out = chosen[0].path / NAME if len(chosen) == 1 else where.experiments / NAME
    return deliver(chosen[0], text, out, opened=opened)


def deliver(experiment: Experiment, text: str, path: Path, *, opened: bool) -> int:
    """Write a page, print its path, and open it in a browser if wanted."""
    of_experiment = path == experiment.path / NAME
    try:
        experiment.write(NAME, text) if of_experiment else files.replace_file(path, text)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", "--out FILE writes the page elsewhere"
        ) from error
    say(f"{path}: {format_bytes(path.stat().st_size)}")
    if opened and not webbrowser.open(path.absolute().as_uri()):
        say(f"no browser could be started here; copy the file to where there is one: {path}")
    return EXIT_DONE
