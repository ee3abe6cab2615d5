"""Does what a rank needs of the interpreter and no public function does; all of it is here.

It calls private functions of CPython, so each is tested against `python program`, on every version
of it there is (tests/node/job/test_interpreter.py, test_rank.py). Imports nothing of ours: rank.py
loads it by its path, into the process of the user's program.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.machinery
import io
import os
import runpy
import signal
import sys
import threading
import time
import weakref
from typing import Any

# What every Python has imported before a program begins: a program's own are not looked at.
STARTED_WITH = {
    *sys.builtin_module_names, "__main__", "_collections_abc", "_sitebuiltins", "abc", "codecs",
    "encodings", "genericpath", "io", "os", "posixpath", "site", "stat", "zipimport",
}  # fmt: skip
BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
RESTING_SECONDS = 1.0  # in which threads of C code are waited for


def end_threads_and_exit_functions() -> None:
    """Wait for threads and call what atexit has, as the interpreter does at its end."""
    threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):  # printed; before Python 3.10 also raised
        atexit._run_exitfuncs()


def forget_the_parent() -> None:
    """Drop what a fork inherits from torchrun's agent and a program of its own would not have."""
    from multiprocessing import process, set_start_method

    # Else set_start_method("spawn") fails, and the main process is not called MainProcess.
    set_start_method(None, force=True)
    process.current_process().name = "MainProcess"
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # the agent's temporary files are not ours to remove
    # Else all ranks of a node would draw the same numbers; Python's own are drawn anew by fork().
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    of_torch = getattr(sys.modules.get("torch"), "default_generator", None)
    if of_torch is not None:
        of_torch.seed()  # the processor's; those of GPUs begin alike in any process
    # multiprocessing has put a file before descriptor 0.
    old = sys.__stdin__
    if old is not None and old.closed:
        os.close(sys.stdin.fileno())
        new: Any = open(0, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        sys.stdin = sys.__stdin__ = new  # type: ignore[misc]
    let_go_of_pipes()


def let_go_of_pipes() -> None:
    """Replace the parent's pipes and sockets by /dev/null, under the same numbers.

    torchrun waits until nobody holds the pipe of a rank that it forked: a process that outlives
    the rank would keep the job from ending. Closed numbers would be given to the program's own
    files, which an object of the parent might close.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            held = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own
            continue
        if fd > 2 and held.startswith(("pipe:", "socket:")):
            os.dup2(null, fd, inheritable=False)
    os.close(null)


def let_threads_rest() -> None:
    """Leave the interpreter to the threads of C code until they have nothing to do.

    gloo frees what a backward pass has reduced in threads of its own, which takes the interpreter.
    The destructor of a process group waits for these threads, and holds it: a rank hung at its end.
    """
    own = str(threading.get_native_id())
    deadline, quiet = time.monotonic() + RESTING_SECONDS, 0
    while quiet < 2 and time.monotonic() < deadline:
        time.sleep(0.002)
        others = [thread for thread in os.listdir("/proc/self/task") if thread != own]
        quiet = 0 if any(map(runs, others)) else quiet + 1


def runs(thread: str) -> bool:
    """Return True if a thread runs, or waits for a processor."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/stat", "rb") as file:
        return b") R " in file.read()
    return False


class Left:
    """Lives as long as the names of the program, which it knows."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names


def finalize_objects() -> None:
    """Do what os._exit leaves out: finalize objects, write files that were never closed."""
    let_threads_rest()
    write_files()  # of a file in a cycle, what is buffered may go after its descriptor
    if threading.active_count() == 1:  # a daemon thread would trip over what is missing
        let_go_of_the_program()
    gc.collect()
    write_files()


def write_files() -> None:
    frozen = [sys.__stdout__, sys.__stderr__]  # gc does not know these two
    for file in (*frozen, *(thing for thing in gc.get_objects() if type(thing) in BUFFERED)):
        if file is not None and not file.closed and file.writable():
            file.flush()


def let_go_of_the_program() -> None:
    """Finalize the program's objects while its names still mean something to their methods.

    Names that something holds are emptied, as the interpreter does with a module that is left.
    """
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # the interpreter lets go of these first
            signal.signal(number, signal.SIG_DFL)
    sys.modules.pop("__mp_main__", None)
    left = Left(vars(sys.modules.pop("__main__")))
    left.names["orchestrator_left"] = left
    alive = weakref.ref(left)
    del left
    gc.collect()
    if (still := alive()) is not None:
        still.names.update(dict.fromkeys(set(still.names) - {"__builtins__"}))


def search_first(place: str, *, always: bool = False) -> None:
    """Search this place first, as a program that is started there does.

    With PYTHONSAFEPATH (since Python 3.11) that is so only where it is the program itself.
    """
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = place  # instead of the directory of our own program
    elif always:
        sys.path.insert(0, place)
    else:
        return
    let_users_files_win(place)


def let_users_files_win(directory: str) -> None:
    """Forget what this process has imported and the program would take from its own directory.

    A program finds its own resource.py or tqdm/ before those of the library and of installed
    packages; but who asks for a name that is imported already, gets that.
    """
    names: set[str] = set()
    with contextlib.suppress(OSError):  # a zip file, or a directory that it may not list
        names = {name.partition(".")[0] for name in os.listdir(directory or ".")}
    for name in sorted(names & sys.modules.keys() - STARTED_WITH):
        spec = importlib.machinery.PathFinder.find_spec(name, [directory])
        origin = spec and spec.origin  # a directory without __init__.py hides nothing
        if origin and origin != getattr(sys.modules[name], "__file__", None):
            for hidden in [key for key in sys.modules if f"{key}.".startswith(f"{name}.")]:
                del sys.modules[hidden]


def unbuffer() -> None:
    """Write all text at once, as under `python -u`: how torchrun starts its ranks."""
    for name in ("stdout", "stderr"):
        old: io.TextIOWrapper = getattr(sys, name)
        if isinstance(old.buffer, io.RawIOBase):
            continue  # this Python was started with -u
        old.flush()
        raw: Any = io.FileIO(old.fileno(), "w", closefd=False)
        raw.name = old.name
        new: Any = io.TextIOWrapper(raw, old.encoding, old.errors, "\n", write_through=True)
        new.mode = old.mode
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def run_module(name: str, *, alter_argv: bool) -> None:
    """Run a module as the interpreter does for -m; run_module() of runpy restores __main__."""
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]
