"""`orchestrator report`: write one HTML page of an experiment, or of several side by side."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.common import files
from orchestrator.common.errors import EXIT_DONE, UsageError
from orchestrator.common.text import size
from orchestrator.config.launch import Where
from orchestrator.head.commands import diff
from orchestrator.head.screen.output import say
from orchestrator.records import experiments
from orchestrator.views.report import page, story
from orchestrator.views.report.scaling import sizes

NAME = "report.html"
MOST_LINES = 8  # more lines in one chart cannot be told apart


def report(
    where: Where, wanted: Sequence[str], *, out: Path | None, opened: bool, scaling: bool = False
) -> int:
    if len(wanted) > MOST_LINES:
        raise UsageError(f"{len(wanted)} experiments do not fit on one page: at most {MOST_LINES}")
    names: Sequence[str | None] = [*dict.fromkeys(wanted)] or [None]  # the newest
    chosen = [
        experiments.known(where.experiments, name, trusted=where.trust_record) for name in names
    ]
    stories = [story.read_story(experiment, len(chosen) - 1) for experiment in chosen]
    differences = diff.compared(chosen) if len(chosen) > 1 else {}
    of_sizes = sizes(stories) if scaling else ()
    text = page.page(stories, differences, of_sizes)
    if out is None and len(chosen) == 1:
        path = chosen[0].path / NAME
        write(path, lambda: chosen[0].write(NAME, text))
    else:
        path = out or where.experiments / NAME
        write(path, lambda: files.replace(path, text))
    say(f"{path}: {size(path.stat().st_size)}")
    if opened and not webbrowser.open(path.absolute().as_uri()):
        say(f"no browser could be started here; copy the file to where there is one: {path}")
    return EXIT_DONE


def write(path: Path, written: Callable[[], None]) -> None:
    try:
        written()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", "--out FILE writes the page elsewhere"
        ) from error
