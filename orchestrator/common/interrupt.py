"""Answer Ctrl-C at once while no job runs yet, and leave the process. Imports next to nothing."""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_undo: Callable[[], None] | None = None
_held: list[int] | None = None
_before_exit: list[Callable[[], None]] = []


def call_before_exit(call: Callable[[], None]) -> None:
    """Register a function to call when the process exits; it must neither wait nor fail."""
    atexit.unregister(_prepare_exit)
    atexit.register(_prepare_exit)
    _before_exit.append(call)


def exit_at_once(code: int) -> NoReturn:
    """Exit at once: threads that still wait for a dead node must not hold the process."""
    _prepare_exit()
    os._exit(code)


def _prepare_exit() -> None:
    while _before_exit:
        _before_exit.pop()()


def install_handlers() -> None:
    """Install the handlers; to be called first, so that even an import can be interrupted."""
    for number in SIGNALS:
        signal.signal(number, _answer)
    _answer_hang_up()


def _answer_hang_up() -> None:
    try:
        # Under nohup, SIGHUP stays ignored.
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            signal.signal(signal.SIGHUP, _answer)
    # Only a main thread can set handlers, and its program has handlers of its own.
    except ValueError:
        pass


def _answer(number: int, frame: FrameType | None) -> None:
    if _held is not None:
        _held.append(number)
        return
    for other in SIGNALS:
        # Further interrupts must not cut the clean-up short.
        signal.signal(other, signal.SIG_IGN)
    if _undo is not None:
        _undo()
    # contextlib.suppress would need an import.
    try:  # noqa: SIM105
        os.write(2, b"\ninterrupted\n")
    # The terminal was closed.
    except OSError:
        pass
    exit_at_once(130)


def undo_on_interrupt(undo: Callable[[], None] | None) -> None:
    """Set what to undo, if anything, when an interrupt comes from now on."""
    global _undo  # noqa: PLW0603
    _undo = undo


def hold_interrupts() -> None:
    """Hold interrupts: a half-started job must be recorded before it can be ended.

    The hang-up of a closed terminal is held as well: it would leave a job without a head.
    """
    global _held  # noqa: PLW0603
    if _held is None:
        _held = []
    _answer_hang_up()


def end_is_wanted() -> bool:
    """Return True if an interrupt came since hold_interrupts(); a closed terminal is none."""
    return any(number in SIGNALS for number in _held or ())


def answer_held_interrupts() -> None:
    """Answer at once again, including the interrupts that were held."""
    for number in release_interrupts():
        _answer(number, None)


def release_interrupts() -> list[int]:
    """Stop holding; return the signals since hold_interrupts(), which the caller answers."""
    global _held
    held, _held = _held or [], None
    return held
