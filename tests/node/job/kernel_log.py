"""Lines that a test writes to the kernel's real log."""

import os
from pathlib import Path

import pytest


def say(line: str) -> None:
    """Log a line as a driver does; without its end, it is only read once another comes."""
    Path("/dev/kmsg").write_text(f"{line}\n", encoding="ascii")


def refuse_to_alarm() -> None:
    """Skip the test if only root may write there, or if a monitor may watch real GPUs."""
    if os.geteuid():
        pytest.skip("only root may write to the kernel's log")
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("a monitor of this machine's GPUs would take them for broken")
