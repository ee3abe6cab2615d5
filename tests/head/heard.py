"""Hears what is told, in place of the terminal."""

import contextlib
from collections.abc import Iterator

from orchestrator.head.screen.events import event_listener
from orchestrator.head.screen.lines import clean_line


@contextlib.contextmanager
def hearing() -> Iterator[list[str]]:
    """Collect the words of the events that are told within the block."""
    said: list[str] = []
    with event_listener(draw=lambda event: said.append(clean_line(event.words()))):
        yield said
