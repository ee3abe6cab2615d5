"""Keeps what people say of an experiment: a note, and tags.

The record has what the launch said. What was said since stands in a file beside it, whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from orchestrator.common import files
from orchestrator.common.errors import UsageError
from orchestrator.config.label import LONGEST_NOTE, MOST_TAGS, Label, checked, launched, shown
from orchestrator.protocol.message import Nonsense, decode, parse
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
