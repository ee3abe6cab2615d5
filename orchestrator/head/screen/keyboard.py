"""Reads single keys while a job runs in the foreground of a terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty

KEYS = "d leaves the job running, Ctrl-C asks it to save and stop, Ctrl-C twice kills it"


class Keyboard:
    """`with Keyboard() as keys: keys.pressed()`; "" without a terminal or in the background."""

    def __init__(self) -> None:
        self._saved: list[object] | None = None
        self._early = ""

    def __enter__(self) -> Keyboard:
        if in_foreground():
            self._saved = termios.tcgetattr(0)
            # Keys arrive without Enter; Ctrl-C remains a signal.
            tty.setcbreak(0, termios.TCSADRAIN)
            # Keys that were pressed while the job was being started.
            early = self.pressed()
            # Other text was typed ahead for the shell.
            self._early = early if early and not early.strip("d") else ""
        return self

    def __exit__(self, *_: object) -> None:
        if self._saved is not None and in_foreground():
            termios.tcsetattr(0, termios.TCSADRAIN, self._saved)  # type: ignore[arg-type]

    def pressed(self) -> str:
        if self._saved is None or not in_foreground():
            return ""
        early, self._early = self._early, ""
        if early or not select.select([0], [], [], 0)[0]:
            return early
        return os.read(0, 64).decode("utf-8", "replace")


def in_foreground() -> bool:
    """Return True if this process is in the foreground of the terminal.

    In the background, using the terminal would stop it (SIGTTIN, SIGTTOU).
    """
    try:
        return sys.stdin is not None and os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
