"""Answer Ctrl-C at once while no job runs yet, whatever is going on. Imports next to nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_undo: Callable[[], None] | None = None
_held: list[int] | None = None


def answer_at_once() -> None:
    """Install the handlers; to be called first, so that even an import can be interrupted."""
    for number in SIGNALS:
        signal.signal(number, _answer)


def _answer(number: int, frame: FrameType | None) -> None:
    if _held is not None:
        _held.append(number)
        return
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)  # pressing it nine more times changes nothing
    if _undo is not None:
        _undo()
    os.write(2, b"\ninterrupted\n")
    os._exit(130)


def undo_with(undo: Callable[[], None] | None) -> None:
    """Set what to undo, if anything, when an interrupt comes from now on."""
    global _undo  # noqa: PLW0603  a signal handler has nowhere else to look
    _undo = undo


def hold() -> None:
    """Hold interrupts: a half-started job must be recorded before it can be ended."""
    global _held  # noqa: PLW0603
    if _held is None:
        _held = []


def answer_now() -> None:
    """Answer at once again, including the interrupts that were held."""
    for number in release():
        _answer(number, None)


def release() -> list[int]:
    """Stop holding and return the signals that came since hold(), for the caller to answer."""
    global _held
    held, _held = _held or [], None
    return held
