"""What people say of an experiment: a note, and tags. A launch may say it, and anybody later.

The record has what the launch said. What was said since stands in a file beside it, whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from orchestrator.common import files
from orchestrator.common.errors import UsageError
from orchestrator.protocol.message import Nonsense, decode, parse
from orchestrator.records.experiment import Experiment, JobRecord

NAME = "label.json"
LONGEST_NOTE, LONGEST_TAG, MOST_TAGS = 2000, 60, 20
LARGEST_BYTES = 1 << 16


@dataclass(frozen=True)
class Label:
    note: str = ""
    tags: tuple[str, ...] = ()


def of(experiment: Experiment, record: JobRecord) -> Label:
    """Return what was said last; a file that is none says nothing."""
    try:
        with files.open_plain(experiment.path / NAME) as file:
            found = decode(Label, parse(file.read(LARGEST_BYTES)), newer=True)
    except FileNotFoundError:
        found = Label(record.launch.note or "", tuple(record.launch.tag))
    except (OSError, ValueError, Nonsense):
        return Label()
    return Label(shown(found.note)[:LONGEST_NOTE], tuple(map(shown, found.tags[:MOST_TAGS])))


def shown(text: str) -> str:
    """Write a text in one line, without what a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def checked(label: Label) -> Label:
    """Refuse what no table could show."""
    if len(label.note) > LONGEST_NOTE:
        raise UsageError(
            f"the note has {len(label.note)} letters; at most {LONGEST_NOTE} are allowed"
        )
    if len(label.tags) > MOST_TAGS:
        raise UsageError(f"{len(label.tags)} tags are too many: at most {MOST_TAGS} are allowed")
    for tag in label.tags:
        if not tag or len(tag) > LONGEST_TAG or "," in tag or tag != "".join(shown(tag).split()):
            raise UsageError(
                f"{tag!r} cannot be a tag",
                f"write a word without spaces and commas, of at most {LONGEST_TAG} letters",
            )
    return label


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
