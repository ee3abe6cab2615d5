"""`orchestrator label`: note what an experiment was for, and tag it.

The record has what the launch said. What was said since stands in a file beside it, whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

from orchestrator.common import files
from orchestrator.common.errors import EXIT_DONE, UsageError
from orchestrator.config.label import LONGEST_NOTE, MOST_TAGS, Label, checked, launched, shown
from orchestrator.config.launch import Where
from orchestrator.head.screen import output
from orchestrator.head.screen.output import Terminal
from orchestrator.protocol.message import Nonsense, decode, parse
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, JobRecord

NAME = "label.json"
LARGEST_BYTES = 1 << 16


def of(experiment: Experiment, record: JobRecord) -> Label:
    """Return what was said last; a file that is none says nothing."""
    try:
        with files.open_plain(experiment.path / NAME) as file:
            found = decode(Label, parse(file.read(LARGEST_BYTES)), newer=True)
    except FileNotFoundError:
        found = launched(record.launch)
    except (OSError, ValueError, Nonsense):
        return Label()
    return Label(shown(found.note)[:LONGEST_NOTE], tuple(map(shown, found.tags[:MOST_TAGS])))


def change(
    experiment: Experiment,
    record: JobRecord,
    *,
    note: str | None = None,
    tags: Sequence[str] = (),
    without: Sequence[str] = (),
) -> Label:
    """Write the note anew, where there is one; add tags, and take some away."""
    label = of(experiment, record)
    if missing := [tag for tag in without if tag not in label.tags]:
        has = f"it has {', '.join(label.tags)}" if label.tags else "it has none"
        raise UsageError(f"{experiment.name} has no tag {missing[0]!r}", has)
    kept = [tag for tag in dict.fromkeys([*label.tags, *tags]) if tag not in without]
    label = checked(replace(label, note=label.note if note is None else note, tags=tuple(kept)))
    try:
        experiment.write(NAME, json.dumps(asdict(label), indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"{experiment.path / NAME} cannot be written: {error.strerror}") from error
    return label


def label(
    where: Where,
    wanted: str | None,
    *,
    note: str | None,
    tags: Sequence[str],
    without: Sequence[str],
    as_json: bool,
) -> int:
    """Change what is said of an experiment; without a change, show it."""
    experiment = experiments.known(where.experiments, wanted, trusted=where.trust_record)
    record = experiment.read_record()
    if note is None and not tags and not without:
        found = of(experiment, record)
    else:
        found = change(experiment, record, note=note, tags=tags, without=without)
    data = {"experiment": experiment.name, **asdict(found)}
    output.result(data, partial(to_text, experiment.name, found), as_json=as_json)
    return EXIT_DONE


def to_text(name: str, found: Label, terminal: Terminal) -> str:
    tags = ", ".join(found.tags) or "none"
    return f"{name}\n  note: {found.note or 'none'}\n  tags: {tags}"
