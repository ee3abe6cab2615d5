"""Ctrl-C before a job runs: an answer at once, whatever is going on. Imports next to nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_undo: Callable[[], None] | None = None
_held: list[int] | None = None


def answer_at_once() -> None:
    """From the first line of the program on, so that even an import can be interrupted in peace."""
    for number in SIGNALS:
        signal.signal(number, _answer)


def _answer(number: int, frame: FrameType | None) -> None:
    if _held is not None:
        _held.append(number)
        return
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)  # nine more of them change nothing
    if _undo is not None:
        _undo()
    os.write(2, b"\ninterrupted\n")
    os._exit(130)


def undo_with(undo: Callable[[], None] | None) -> None:
    """What has to be taken back if it is interrupted from now on, if anything."""
    global _undo  # noqa: PLW0603  signals have no other place to look
    _undo = undo


def hold() -> None:
    """Remember interrupts from now on: what is being started has to be known to be ended."""
    global _held  # noqa: PLW0603
    if _held is None:
        _held = []


def answer_now() -> None:
    """Answer at once again, also what was held."""
    for number in release():
        _answer(number, None)


def release() -> list[int]:
    """Those that came since hold(), for whoever can answer them now."""
    global _held
    held, _held = _held or [], None
    return held
