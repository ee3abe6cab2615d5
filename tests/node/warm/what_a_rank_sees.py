"""A program that prints all that it finds of its process and of its interpreter, as one JSON line.

What a program could act upon is in it, but for what must differ from one start to the next (PIDs,
times, addresses, random numbers). Runs on a node's Python, as a rank or by hand.
"""

from __future__ import annotations

import sys

MODULES = sorted(sys.modules)  # before any of these is imported

# pathlib would be imported for the program.
# ruff: noqa: E402, PTH109, PTH115, PTH116, PTH123, PTH208
import atexit
import builtins
import ctypes
import faulthandler
import gc
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import stat
import struct
import threading
import time
import tracemalloc
import warnings
import weakref
from typing import Any

MARK = "what a rank sees: "
STATUS = [
    "Umask",
    "Uid",
    "Gid",
    "Groups",
    "NoNewPrivs",
    "Seccomp",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "SigBlk",
    "SigIgn",
    "SigCgt",
    "SigPnd",
    "ShdPnd",
    "Cpus_allowed",
    "Mems_allowed",
    "THP_enabled",
    "CoreDumping",
    "TracerPid",
    "Speculation_Store_Bypass",
]
TEXTS = [
    "oom_score_adj",
    "personality",
    "coredump_filter",
    "timerslack_ns",
    "cgroup",
    "loginuid",
    "sessionid",
    "comm",
    "attr/current",
    "limits",
    "setgroups",
    "uid_map",
]
PRCTL = {"PDEATHSIG": 2, "DUMPABLE": 3, "KEEPCAPS": 7, "SUBREAPER": 37, "THP_DISABLE": 42}
IOPRIO_GET = {"x86_64": 252, "aarch64": 31}


def text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError as error:
        return str(error.strerror)


def status() -> dict[str, str]:
    lines = (line.partition(":") for line in text("/proc/self/status").splitlines())
    return {name: value.strip() for name, _, value in lines if name in STATUS}


def prctl() -> dict[str, int]:
    got = {}
    call = ctypes.CDLL(None).prctl
    for name, number in PRCTL.items():
        value = ctypes.c_int(0)
        pointed = name in ("PDEATHSIG", "SUBREAPER")
        answer = call(number, ctypes.byref(value) if pointed else 0, 0, 0, 0)
        got[name] = value.value if pointed else answer
    return got


def descriptor(number: str) -> Any:
    path = f"/proc/self/fd/{number}"
    try:
        held = os.readlink(path)
        mode = stat.S_IFMT(os.stat(path).st_mode)
        flags = [
            line for line in text(f"/proc/self/fdinfo/{number}").splitlines() if "flags" in line
        ]
    except OSError:
        return None
    kind = held.partition(":")[0] if held.startswith(("pipe:", "socket:", "anon_inode:")) else held
    return [kind, mode, flags]


def descriptors() -> dict[str, Any]:
    found = {number: descriptor(number) for number in sorted(os.listdir("/proc/self/fd"), key=int)}
    return {number: what for number, what in found.items() if what is not None}


def c_environment() -> list[str]:
    """Return what C code and programs that are executed from here find."""
    block = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found = []
    while block[len(found)]:
        found.append(block[len(found)].decode("utf-8", "surrogateescape"))
    return sorted(found)


def shown_environment() -> list[str]:
    words = text("/proc/self/environ").split("\0")
    return sorted(filter(None, words))


def stream(name: str) -> Any:
    own = getattr(sys, name)
    if own is None:
        return None
    kind = stat.S_IFMT(os.fstat(own.fileno()).st_mode)
    inner = [
        type(own).__name__,
        type(own.buffer).__name__,
        type(getattr(own.buffer, "raw", 0)).__name__,
    ]
    same = own is getattr(sys, f"__{name}__")
    buffers = [own.line_buffering, own.write_through, own.newlines]
    return [own.name, own.mode, own.encoding, own.errors, own.isatty(), kind, inner, same, buffers]


def io_priority() -> Any:
    number = IOPRIO_GET.get(os.uname().machine)
    return ctypes.CDLL(None).syscall(number, 1, 0) if number else None


def process() -> dict[str, Any]:
    kinds = sorted({v for n, v in vars(resource).items() if n.startswith("RLIMIT_")})
    pid = os.getpid()
    return {
        "status": status(),
        "proc": {name: text(f"/proc/self/{name}") for name in TEXTS},
        "prctl": prctl(),
        "limits": {kind: resource.getrlimit(kind) for kind in kinds},
        "priority": [os.getpriority(os.PRIO_PROCESS, 0), io_priority()],
        "scheduler": [os.sched_getscheduler(0), os.sched_getparam(0).sched_priority],
        "affinity": sorted(os.sched_getaffinity(0)),
        "group": [os.getsid(0) == pid, os.getpgrp() == pid],
        "parent": text(f"/proc/{os.getppid()}/cmdline").replace("\0", " ").rstrip(),
        "command": [word[:200] for word in text("/proc/self/cmdline").rstrip("\0").split("\0")],
        "executable": os.readlink("/proc/self/exe"),
        "root": os.readlink("/proc/self/root"),
        "namespaces": sorted(
            os.readlink(f"/proc/self/ns/{n}") for n in os.listdir("/proc/self/ns")
        ),
        "threads": THREADS,
        "timers": [signal.getitimer(n) for n in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL)],
        "children": text(f"/proc/self/task/{pid}/children"),
        "files": FILES,
        "directory": os.getcwd(),
    }


def interpreter() -> dict[str, Any]:
    main = sys.modules["__main__"]
    return {
        "argv": [sys.argv, getattr(sys, "orig_argv", None), sys.executable, sys.prefix],
        "path": sys.path,
        "flags": str(sys.flags),
        "options": [sys.warnoptions, str(sys._xoptions), sys.dont_write_bytecode],
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), str(sys.thread_info)],
        "digits": getattr(sys, "get_int_max_str_digits", lambda: None)(),
        "encodings": [sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()],
        "streams": [stream(name) for name in ("stdin", "stdout", "stderr")],
        "hooks": {
            name: str(getattr(sys, name)).partition(" at 0x")[0]
            for name in dir(sys)
            if "hook" in name
        },
        "finders": [str(finder).partition(" at 0x")[0] for finder in sys.meta_path],
        "tracing": [str(sys.gettrace()), str(sys.getprofile()), tracemalloc.is_tracing()],
        "main": {n: repr(v).partition(" at 0x")[0] for n, v in MAIN.items()},
        "main is": [main.__name__, type(main).__name__, sys.modules.get("__mp_main__") is not None],
        "builtins": sorted(vars(builtins)),
        "modules": MODULES,
        "signals": {
            int(n): str(signal.getsignal(n)).partition(" at 0x")[0] for n in signal.valid_signals()
        },
        "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding()],
        "time": [time.tzname, time.timezone, time.daylight],
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)],
        "warnings": [str(each) for each in warnings.filters],
        "faulthandler": faulthandler.is_enabled(),
        "threads": [thread.name for thread in threading.enumerate()],
        "main thread": threading.current_thread() is threading.main_thread(),
        "processes": [
            MULTIPROCESSING,
            multiprocessing.current_process().name,
            str(multiprocessing.parent_process()),
            len(multiprocessing.active_children()),
            len(multiprocessing.current_process().authkey),
        ],
        "at exit": atexit._ncallbacks(),
        "finalizers": len([f for f in list(weakref.finalize._registry) if f.atexit]),
        "logging": [logging.getLogger().level, [str(h) for h in logging.getLogger().handlers]],
        "sockets": socket.getdefaulttimeout(),
        "processors": os.cpu_count(),
        "hash": hash("a word") if os.environ.get("PYTHONHASHSEED", "random") != "random" else None,
        "umask": os.umask(0),
    }


def libraries() -> dict[str, Any]:
    """Return what the program finds of the packages that a start may have imported for it."""
    found: dict[str, Any] = {}
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "get_num_threads"):
        found["torch"] = [
            torch.__version__,
            torch.get_num_threads(),
            torch.get_num_interop_threads(),
            torch.get_default_dtype().__str__(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
            torch.backends.mkldnn.is_available(),
            torch.get_float32_matmul_precision(),
            torch.distributed.is_available() and torch.distributed.is_initialized(),
            str(torch.multiprocessing.get_start_method(allow_none=True)),
            torch.__config__.parallel_info().splitlines(),
        ]
    numpy: Any = sys.modules.get("numpy")
    if hasattr(numpy, "geterr"):
        found["numpy"] = [numpy.__version__, numpy.geterr(), numpy.get_printoptions()["precision"]]
    return found


def drawn() -> list[Any]:
    """Return numbers that must differ from those of each other rank and start."""
    numbers: list[Any] = [random.random(), struct.unpack("<d", os.urandom(8))[0]]
    if "numpy.random" in sys.modules:
        numbers.append(float(sys.modules["numpy.random"].random()))
    if hasattr(sys.modules.get("torch"), "rand"):
        numbers.append(float(sys.modules["torch"].rand(())))
    return [repr(number) for number in numbers]


if __name__ == "__main__":
    MAIN = {name: value for name, value in list(globals().items()) if name.startswith("__")}
    FILES = descriptors()
    THREADS = len(os.listdir("/proc/self/task"))
    MULTIPROCESSING = multiprocessing.get_start_method(allow_none=True)
    variables = {
        "environ": dict(os.environ),
        "of C code": c_environment(),
        "as shown": shown_environment(),
    }
    if os.environ.get("ALSO_IMPORTS"):
        for module in os.environ["ALSO_IMPORTS"].split():
            __import__(module)
    what = {"variables": variables, "process": process(), "interpreter": interpreter()}
    rest = {"libraries": libraries(), "drawn": drawn(), "imported": sorted(sys.modules)}
    if "SEEN_IN" in os.environ:  # a file, of each rank and attempt its own
        attempt = os.environ.get("ORCHESTRATOR_ATTEMPT", "1")
        with open(f"{os.environ['SEEN_IN']}.{attempt}.{os.environ['RANK']}", "w") as file:
            json.dump({**what, **rest}, file)
    else:
        print(MARK + json.dumps({**what, **rest}), flush=True)
