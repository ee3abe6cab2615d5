"""Checks a note and tags: what people say of a run has to fit into a table."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import Launch

LONGEST_NOTE, LONGEST_TAG, MOST_TAGS = 2000, 60, 20


@dataclass(frozen=True)
class Label:
    note: str = ""
    tags: tuple[str, ...] = ()


def launched(launch: Launch) -> Label:
    return Label(launch.note or "", tuple(launch.tag))


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


def shown(text: str) -> str:
    """Write a text in one line, without what a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
