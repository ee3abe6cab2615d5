"""Brings what stages and commands tell to the user, through one listener.

A stage tells an event; it neither prints nor logs it. The listener writes the event into head.log,
draws it, and passes it to the commands of --notify.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from orchestrator.common import hiding
from orchestrator.head.screen import output, styles
from orchestrator.protocol.message import Message, dataclass_transform

log = logging.getLogger(__name__)


@dataclass_transform(kw_only_default=False, frozen_default=True)
class HeadEvent(Message):
    """Something that happened; `sentence` is its text for the user, with fields in braces."""

    sentence = ""
    style = ""
    level = logging.INFO
    # False for an event that the log and --notify alone receive.
    is_drawn = True

    def words(self) -> str:
        return self.sentence.format(**vars(self))

    def styled_words(self) -> str:
        """Return the words in their colours, without secrets."""
        return hiding.without_secrets(styles.style_text(self.words(), self.style))


class Alarm(HeadEvent):
    """An event on which the user may have to act."""

    style = styles.WARNING
    level = logging.WARNING


class Note(HeadEvent):
    """A sentence of a command about its own work."""

    sentence = "{what}"
    what: str


def draw_on_terminal(event: HeadEvent) -> None:
    """Print an event with the prefix that separates it from the program's output."""
    prefix = styles.style_text(output.OURS, styles.DIM)
    output.print_own_line(f"{prefix} {event.styled_words()}")


@dataclass(frozen=True, eq=False)
class Listener:
    """Logs events, draws them, and passes them on to those who want to be notified."""

    draw: Callable[[HeadEvent], None] = draw_on_terminal
    notify: Callable[[HeadEvent], None] = lambda _: None

    def hear(self, event: HeadEvent) -> None:
        words = output.printable_text(event.words())
        # The mark keeps the record off the terminal, which has the event itself.
        log.log(event.level, "%s: %s", type(event).__name__, words, extra={"shown": True})
        if event.is_drawn:
            self.draw(event)
        self.notify(event)


listeners = [Listener()]


def tell(event: HeadEvent) -> None:
    """Pass an event to the listener. A caller does not log the same fact."""
    listeners[-1].hear(event)


def say(what: str) -> None:
    """Pass a sentence of a command to the user."""
    tell(Note(what))


@contextlib.contextmanager
def event_listener(**parts: Callable[[HeadEvent], None]) -> Iterator[None]:
    """Within the block, replace parts of the listener: how it draws, or whom it notifies."""
    listener = replace(listeners[-1], **parts)
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)
