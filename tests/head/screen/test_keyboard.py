"""Keys are taken from a real terminal."""

import fcntl
import os
import pty
import subprocess
import sys
import termios

import pytest

PROGRAM = """
from orchestrator.head.screen.keyboard import Keyboard
with Keyboard() as keys:
    print(repr(keys.pressed()), repr(keys.pressed()), flush=True)
"""


@pytest.mark.parametrize(
    ("typed", "taken"),
    [("d", "'d' ''"), ("", "'' ''"), ("cd /data\n", "'' ''"), ("d\n", "'' ''"), ("dir", "'' ''")],
)
def test_keyboard_takes_d_pressed_early_and_leaves_typed_text(typed: str, taken: str) -> None:
    ours, its = pty.openpty()
    try:
        os.write(ours, typed.encode())
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            stdin=its,
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
            check=True,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        assert done.stdout == f"{taken}\n"
    finally:
        os.close(ours)
        os.close(its)
