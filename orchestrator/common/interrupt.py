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


def before_exit(call: Callable[[], None]) -> Callable[[], None]:
    """Call this when the process leaves; it must neither wait nor fail.

    Returns what takes it back.
    """
    atexit.unregister(_prepare_exit)
    atexit.register(_prepare_exit)
    _before_exit.append(call)

    def take_back() -> None:
        if call in _before_exit:
            _before_exit.remove(call)

    return take_back


def leave(code: int) -> NoReturn:
    """Exit at once: threads that still wait for a dead node must not hold the process."""
    _prepare_exit()
    os._exit(code)


def _prepare_exit() -> None:
    while _before_exit:
        _before_exit.pop()()


def answer_at_once() -> None:
    """Install the handlers; to be called first, so that even an import can be interrupted."""
    for number in SIGNALS:
        signal.signal(number, _answer)
    _answer_hang_up()


def _answer_hang_up() -> None:
    try:
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # nohup ignores it
            signal.signal(signal.SIGHUP, _answer)
    except ValueError:  # not in a program's main thread, which has its own answers
        pass


def _answer(number: int, frame: FrameType | None) -> None:
    if _held is not None:
        _held.append(number)
        return
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)  # pressing it nine more times changes nothing
    if _undo is not None:
        _undo()
    try:  # noqa: SIM105 (which needs an import)
        os.write(2, b"\ninterrupted\n")
    except OSError:  # its terminal was closed
        pass
    leave(130)


def undo_with(undo: Callable[[], None] | None) -> None:
    """Set what to undo, if anything, when an interrupt comes from now on."""
    global _undo  # noqa: PLW0603  a signal handler has nowhere else to look
    _undo = undo


def hold() -> None:
    """Hold interrupts: a half-started job must be recorded before it can be ended.

    A terminal that is closed meanwhile is held, too: it would leave a job without a head.
    """
    global _held  # noqa: PLW0603
    if _held is None:
        _held = []
    _answer_hang_up()


def end_is_wanted() -> bool:
    """Tell whether somebody has asked for the end since hold(); a closed terminal does not."""
    return any(number in SIGNALS for number in _held or ())


def answer_now() -> None:
    """Answer at once again, including the interrupts that were held."""
    for number in release():
        _answer(number, None)


def release() -> list[int]:
    """Stop holding and return the signals that came since hold(), for the caller to answer."""
    global _held
    held, _held = _held or [], None
    return held
