"""Checks a note and tags: what people say of a run has to fit into a table."""

from __future__ import annotations

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import Launch

LONGEST_NOTE, LONGEST_TAG, MOST_TAGS = 2000, 60, 20


def check(launch: Launch) -> None:
    """Refuse a note or tags that no table could show."""
    note = launch.note or ""
    if len(note) > LONGEST_NOTE:
        raise UsageError(f"the note has {len(note)} letters; at most {LONGEST_NOTE} are allowed")
    if len(launch.tag) > MOST_TAGS:
        raise UsageError(f"{len(launch.tag)} tags are too many: at most {MOST_TAGS} are allowed")
    for tag in launch.tag:
        if not tag or len(tag) > LONGEST_TAG or "," in tag or tag != "".join(shown(tag).split()):
            raise UsageError(
                f"{tag!r} cannot be a tag",
                f"write a word without spaces and commas, of at most {LONGEST_TAG} letters",
            )


def shown(text: str) -> str:
    """Write a text in one line, without what a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
