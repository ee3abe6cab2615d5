"""Makes a process forked from torchrun look, begin and end like a Python process of its own.

It calls two private functions of CPython, threading._shutdown() and atexit._run_exitfuncs(), as
multiprocessing does; tests/node/job/test_rank.py compares them to `python program`. Imports
nothing of this package: rank.py loads it by its path, into the process of the user's program.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence

BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def forget_the_parent() -> None:
    """Drop inherited state of torchrun's agent that a new process would not have."""
    from multiprocessing import process, set_start_method

    # Otherwise set_start_method("spawn") fails, and the main process is not called MainProcess.
    set_start_method(None, force=True)
    process.current_process().name = "MainProcess"
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        # The agent's temporary files belong to the agent.
        finalizer.atexit = False
    # Otherwise all ranks of a node draw the same numbers; Python reseeds only its own at a fork.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    of_torch = getattr(sys.modules.get("torch"), "default_generator", None)
    if of_torch is not None:
        # Only the CPU's generator: those of GPUs begin alike in any process.
        of_torch.seed()
    close_pipes()


def close_pipes() -> None:
    """Replace the parent's pipes and sockets by /dev/null, under the same numbers.

    torchrun waits until no process holds the pipe of a rank that it forked: a process that outlives
    the rank would keep the job from ending. Closed numbers would be given to the program's own
    files, which an object of the parent might close.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        held = ""
        # The descriptor of the listing itself is closed already.
        with contextlib.suppress(OSError):
            held = os.readlink(f"/proc/self/fd/{name}")
        if int(name) > 2 and held.startswith(("pipe:", "socket:")):
            os.dup2(null, int(name), inheritable=False)
    os.close(null)


def end_threads_and_exit_functions() -> None:
    """Wait for threads and call the atexit functions, as the interpreter does at its end."""
    threading._shutdown()  # type: ignore[attr-defined]
    # The interpreter prints an exception here; before Python 3.10 it raises as well.
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()


def write_files() -> None:
    """Flush the files that the program has not closed; os._exit would lose their buffers."""
    # gc does not track these two.
    frozen = [sys.__stdout__, sys.__stderr__]
    for file in (*frozen, *(thing for thing in gc.get_objects() if type(thing) in BUFFERED)):
        with contextlib.suppress(OSError, ValueError):
            if file is not None and file.writable():
                file.flush()


# -- what `ps` and /proc show ------------------------------------------------------------------
#
# A fork keeps its parent's command line and environment. But users look for their script with
# `ps aux | grep train.py`, and this program for its own variables in /proc/PID/environ.
# Both are areas of the process's own memory, and the kernel reads them each time.

# The fields of /proc/PID/stat (proc(5)) that hold the start of each area; the end follows.
ARGUMENTS, ENVIRONMENT = 47, 49


def show_command(words: Sequence[str]) -> bool:
    """Show these words as the command line, cut at the end of the original area."""
    return overwrite_area(ARGUMENTS, [os.fsencode(word) for word in words])


def show_environment(variables: Mapping[str, str]) -> bool:
    """Show these variables as the environment; those that do not fit are left out.

    getenv() of C code reads the same memory, so all of os.environ is moved away first. Only for a
    process with one thread, as another might be reading there.
    """
    ctypes.CDLL(None).clearenv()
    for name, value in os.environ.items():
        os.putenv(name, value)
    lines = [os.fsencode(f"{name}={value}") for name, value in variables.items()]
    return overwrite_area(ENVIRONMENT, lines)


def overwrite_area(area: int, strings: Sequence[bytes]) -> bool:
    """Write NUL-terminated strings over one of the two areas; return True if all fitted.

    Writes through /proc/self/mem, where a wrong address is an error and not a crash. The area's
    last byte stays NUL: otherwise the kernel would read on behind it. A variable that was cut
    would have a wrong value, so it is left out as a whole.
    """
    try:
        # The process name may hold spaces and brackets.
        with open("/proc/self/stat", "rb") as file:
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
    # The kernel hides these files or forbids access.
    except (OSError, ValueError, IndexError):
        return False
    return whole
