"""Makes `ps` and /proc show a process as what it runs, though it was forked from another program.

A fork keeps the command line and the environment with which its parent was executed: users look for
their script with `ps aux | grep train.py`, and we for our own variables in /proc/PID/environ. Both
are areas of the process's own memory, and the kernel reads them anew each time. Imports nothing of
ours: rank.py loads it by its path, into the process of the user's program.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence

ARGUMENTS, ENVIRONMENT = 47, 49  # where an area begins and ends, among the fields of proc(5)'s stat


def show_command(words: Sequence[str]) -> bool:
    """Show these words as the command line, cut where the old one's room ends."""
    return overwrite(ARGUMENTS, [os.fsencode(word) for word in words])


def show_environment(variables: Mapping[str, str]) -> bool:
    """Show these variables as the environment, the first ones where the room is too small.

    What C code reads with getenv() stands in the same memory, so all of os.environ is moved away
    first. For a process with one thread: another might be reading there.
    """
    ctypes.CDLL(None).clearenv()
    for name, value in os.environ.items():
        os.putenv(name, value)
    lines = [os.fsencode(f"{name}={value}") for name, value in variables.items()]
    return overwrite(ENVIRONMENT, lines)


def overwrite(area: int, strings: Sequence[bytes]) -> bool:
    """Write strings, each ended by a NUL, over one of the two areas; say whether all had room.

    Through /proc/self/mem, where a wrong address is an error and not a crash. The area's last byte
    stays NUL: with any other the kernel would go on into what follows it. A string that is cut
    short would say something else than was meant, so one of the environment is left out whole.
    """
    try:
        with open("/proc/self/stat", "rb") as file:  # the name in it may hold spaces and brackets
            fields = file.read().rpartition(b")")[2].split()
        start, end = (int(field) for field in fields[area - 2 : area])
        room = end - start
        if room <= 0:
            return False
        text = b"".join(string + b"\0" for string in strings)
        whole = len(text) <= room
        if not whole and area == ENVIRONMENT:
            text = text[: text.rfind(b"\0", 0, room) + 1]
        memory = os.open("/proc/self/mem", os.O_RDWR)
        try:
            os.pwrite(memory, text[: room - 1].ljust(room, b"\0"), start)
        finally:
            os.close(memory)
    except (OSError, ValueError, IndexError):  # a kernel that hides them or forbids it
        return False
    return whole
