"""What torchrun starts in place of the user's program: one rank, and its keeper.

torchrun's own child (the keeper) forks the real rank and waits for it, so that how the rank ended
is known exactly (exit code, signal, peak memory) whatever killed it; to torchrun the keeper ends
the same way. The rank sends its output down its own FIFO, so every line is known to be its own, and
runs the program as `python program args` would. Stands alone: it shares a process with the user's
code, so it imports nothing of ours.
"""

from __future__ import annotations

import _thread
import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib.machinery
import importlib.util
import io
import json
import os
import pkgutil
import resource
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
HELD = (*FORWARDED, signal.SIGQUIT)
# A device that only a live CUDA (uvm) or ROCm (kfd) context holds open; NVML alone does not.
CONTEXT_DEVICES = ("/dev/nvidia-uvm", "/dev/kfd")
STACKS = signal.SIGRTMIN + 9  # as node/hang.py sends it
CALL = os.path.join(os.path.dirname(__file__), "run_function.py")  # the program of Cluster.run
BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


class Rank:
    """One rank of the job described by the run directory's spec.json."""

    def __init__(self) -> None:
        self.run = os.environ["ORCHESTRATOR_RUN"]
        with open(os.path.join(self.run, "spec.json"), encoding="ascii") as file:
            self.spec: dict[str, Any] = json.load(file)
        self.rank = int(os.environ["RANK"])
        self.local = int(os.environ["LOCAL_RANK"])
        self.forked = False  # of torchrun's agent, torch and all; else a Python of its own

    def report(self, **fields: Any) -> None:
        """One line to the supervisor. Under PIPE_BUF, so lines of ranks never mix."""
        line = json.dumps({"rank": self.rank, "local": self.local, "time": time.time(), **fields})
        try:
            fd = os.open(os.path.join(self.run, "reports"), os.O_WRONLY | os.O_NONBLOCK)
            os.write(fd, line.encode() + b"\n")
            os.close(fd)
        except OSError:
            pass  # the supervisor is gone: nobody is left to tell

    def main(self) -> None:
        if os.environ.pop("ORCHESTRATOR_AFRESH", None):
            buffer_lines()
            self.run_program()
        self.forked = self.spec["start"] == "fork"
        touched = touched_device() if self.forked else ""
        if touched:
            self.report(event="afresh", why=touched)
        self.take_output()
        # Until both have their own answers to signals: torchrun's would raise in the wrong place,
        # and a rank that was just forked would go on as if nobody had asked it to stop.
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
        child = os.fork()
        if child:
            self.keep(child)
        elif touched:
            answer_by_default()
            os.environ["ORCHESTRATOR_AFRESH"] = "1"
            os.execv(sys.executable, [sys.executable, "-u", os.path.abspath(__file__)])
        else:
            self.run_program()

    def take_output(self) -> None:
        fifo = os.open(os.path.join(self.run, f"out_{self.local}"), os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(fifo, 1)
        os.dup2(fifo, 2)
        os.close(fifo)
        buffer_lines()

    def keep(self, child: int) -> None:
        """Wait for the rank, report its end, end the same way: by returning where it went well.

        What torchrun forked has to return, or torchrun waits for its return value for ever.
        """

        def forward(signum: int, frame: FrameType | None) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signum)

        for signum in FORWARDED:
            signal.signal(signum, forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        self.report(event="started", pid=child, keeper=os.getpid())
        _, status, usage = os.wait4(child, 0)
        for signum in FORWARDED:
            signal.signal(signum, signal.SIG_DFL)
        code = os.waitstatus_to_exitcode(status)
        self.report(event="ended", pid=child, code=code, peak_kb=usage.ru_maxrss)
        while code and os.path.exists(os.path.join(self.run, "ending")):
            time.sleep(60)  # if torchrun saw it now it would hurry those that still save
        if code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has dumped its core already
            signal.signal(-code, signal.SIG_DFL) if -code not in (9, 19) else None
            os.kill(os.getpid(), -code)
        if code:
            os._exit(code if code > 0 else 1)

    def run_program(self) -> NoReturn:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_NAME, f"rank{self.rank}".encode())
        answer_by_default()
        code = 0
        try:
            if self.forked:
                forget_torchrun()
            self.run_target()
        except SystemExit as leaving:
            code = self.exit_code(leaving)
        except KeyboardInterrupt as error:
            self.record(error)
            code = 130
        except BaseException as error:  # noqa: BLE001 (the program may raise what it likes)
            self.record(error)
            code = 1
        self.leave(code)

    def leave(self, code: int) -> NoReturn:
        """End as the interpreter does. A forked rank cannot: torchrun's code is beneath us."""
        try:
            threading._shutdown()  # type: ignore[attr-defined]
            with contextlib.suppress(BaseException):  # printed; before Python 3.10 also raised
                atexit._run_exitfuncs()
            if code == 0:
                self.report(event="finished")
            if self.forked:
                end_globals()
        finally:
            if self.forked:
                os._exit(code)
        sys.exit(code)

    def run_target(self) -> None:
        target = self.spec["target"]
        os.chdir(self.spec["workdir"])
        if target["kind"] == "program":
            for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, not by programs
                signal.signal(signum, signal.SIG_DFL)
            os.execvp(target["name"], [target["name"], *target["args"]])
        import faulthandler

        faulthandler.enable()
        self.stand_by(faulthandler.register)
        run_python(target["kind"], target["name"], target["args"])

    def stand_by(self, register: Callable[..., Any]) -> None:
        """For when the job stands still: on a signal, the stacks, even while C code holds the
        interpreter; on a word, what torch remembers of its collectives, by a thread (which
        `threading` does not count), because the main one may never come back."""
        with contextlib.suppress(OSError):
            place = os.path.join(self.run, f"stacks_{self.local}")
            self.stacks = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            register(STACKS, self.stacks, all_threads=True)
            if "torch" in sys.modules:
                os.mkfifo(os.path.join(self.run, f"ask_{self.local}"), 0o600)
                _thread.start_new_thread(self.tell_collectives, ())

    def tell_collectives(self) -> None:
        place = os.path.join(self.run, f"collectives_{self.local}.json")
        while True:
            with open(os.path.join(self.run, f"ask_{self.local}"), "rb") as asked:
                asked.read()
            with contextlib.suppress(Exception):  # a torch that remembers nothing
                dump = sys.modules["torch"]._C._distributed_c10d._dump_fr_trace_json
                with open(place + ".tmp", "wb") as file:
                    file.write(dump())
                os.replace(place + ".tmp", place)

    def exit_code(self, leaving: SystemExit) -> int:
        """As the interpreter sees it: a number is the code, words are an error message."""
        if leaving.code is None:
            return 0
        if isinstance(leaving.code, int):
            if leaving.code & 0xFF:
                self.report(event="exit", code=str(leaving.code))
            return leaving.code & 0xFF
        words = str(leaving.code)
        self.report(event="exit", code=words[:300])  # 12 bytes each at worst: under PIPE_BUF
        sys.stdout.flush()
        sys.stderr.write(words + "\n")
        return 1

    def record(self, error: BaseException) -> None:
        """The traceback without our own frames: to the log, to us, to torchelastic's error file."""
        first = users_frames(error.__traceback__)
        error.__traceback__ = first
        text = "".join(traceback.format_exception(type(error), error, first))
        sys.stdout.flush()
        sys.excepthook(type(error), error, first)  # the program may have set its own
        sys.stderr.flush()
        frames = traceback.extract_tb(first)
        here = users_line(frames)
        said = words_of(error)
        message = f"{type(error).__name__}: {said}"
        record = {
            "type": type(error).__name__,
            "message": said[:20000],
            "traceback": text[-60000:],
            "time": time.time(),
            "pid": os.getpid(),
            "file": here.filename if here else "",
            "line": here.lineno if here else 0,
            "function": here.name if here else "",
            "code": (here.line or "") if here else "",
        }
        if not write_json(os.path.join(self.run, f"error_{self.local}.json"), record):
            short = {
                key: value[:150] if isinstance(value, str) else value
                for key, value in record.items()
            }
            self.report(event="raised", error={**short, "traceback": ""})  # under PIPE_BUF
        elastic = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if elastic and not os.path.exists(elastic):
            stamp = str(int(time.time()))
            extra = {"py_callstack": text[-60000:], "timestamp": stamp}
            write_json(elastic, {"message": {"message": message[:20000], "extraInfo": extra}})


def answer_by_default() -> None:
    """A forked rank inherits torchrun's handlers, which would turn a SIGTERM into an exception."""
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


def touched_device() -> str:
    """Why a process forked from this one may not use the GPU, or nothing."""
    torch = sys.modules.get("torch")
    bad_fork = getattr(getattr(torch, "_C", None), "_cuda_isInBadFork", None)
    if bad_fork is not None and bad_fork():
        return "the torchrun agent had initialised CUDA"
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if link in CONTEXT_DEVICES:
            return f"the torchrun agent held {link} open"
    return ""


def forget_torchrun() -> None:
    """What a forked rank inherits from torchrun's agent and a program of its own would not have."""
    import weakref
    from multiprocessing import process, set_start_method

    # Else set_start_method("spawn") fails, and the main process is not called MainProcess.
    set_start_method(None, force=True)
    process.current_process().name = "MainProcess"
    process._parent_process = None  # type: ignore[attr-defined]
    atexit.unregister(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # the agent's temporary files are not ours to remove
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # else all ranks of a node would draw the same numbers


def end_globals() -> None:
    """What os._exit leaves out: objects are finalized, files that were never closed are written."""
    if threading.active_count() == 1:  # a daemon thread would trip over what is missing
        names = vars(sys.modules["__main__"])
        names.update(dict.fromkeys(set(names) - {"__builtins__"}))
    gc.collect()
    ours = [
        sys.__stdout__,
        sys.__stderr__,
    ]  # frozen: gc does not know these two
    for file in (*ours, *(thing for thing in gc.get_objects() if type(thing) in BUFFERED)):
        if file is not None and not file.closed and file.writable():
            file.flush()


def buffer_lines() -> None:
    """As on a terminal: whole lines leave in one write, so lines of two threads do not tear."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]


def run_python(kind: str, name: str, args: list[str]) -> None:
    """As `python name args` (kind "script") or `python -m name args` (a module) would."""
    sys.argv = [name, *args]
    path = os.path.join(os.getcwd(), name)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={})
    library = os.path.abspath(__file__).rsplit(os.sep, 4)[0]
    if importlib.util.find_spec("orchestrator") is None:  # for `from orchestrator import Trainer`
        sys.path.append(library)
    if kind in ("module", "engine"):
        sys.path[0] = library if kind == "engine" else os.getcwd()
        run_module(name, alter_argv=True)
    elif pkgutil.get_importer(path) is not None:  # a directory or a zip file with a __main__.py
        sys.path[0] = path
        run_module("__main__", alter_argv=False)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        vars(main).update(__file__=path, __loader__=loader, __cached__=None)
        exec(code_of(loader, path), vars(main))


def code_of(loader: importlib.machinery.SourceFileLoader, path: str) -> types.CodeType:
    if path.endswith(".pyc"):
        code = importlib.machinery.SourcelessFileLoader("__main__", path).get_code("__main__")
        assert code is not None
        return code
    return loader.source_to_code(loader.get_data(path), path)


def run_module(name: str, *, alter_argv: bool) -> None:
    """What the interpreter itself calls for -m; public run_module() puts another __main__ back."""
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def words_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as worse:  # noqa: BLE001 (it is the program's own code)
        return f"(its words cannot be had: {type(worse).__name__})"


def users_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's own first frame on."""
    while frames is not None:
        name = frames.tb_frame.f_code.co_filename
        if name not in (__file__, CALL, runpy.__file__) and not name.startswith("<frozen "):
            return frames
        frames = frames.tb_next
    return None


def users_line(frames: traceback.StackSummary) -> traceback.FrameSummary | None:
    """The innermost line that is the user's own: not of an installed package or the library."""
    library = os.path.dirname(os.__file__)
    own = [
        frame
        for frame in frames
        if "site-packages" not in frame.filename
        and "dist-packages" not in frame.filename
        and not frame.filename.startswith((library, "<"))
    ]
    return own[-1] if own else (frames[-1] if frames else None)


def write_json(path: str, record: dict[str, Any]) -> bool:
    try:
        with open(path + ".tmp", "w", encoding="ascii") as file:
            json.dump(record, file)
        os.replace(path + ".tmp", path)
        return True
    except OSError as error:
        sys.stderr.write(f"orchestrator: the error could not be recorded in {path}: {error}\n")
        return False


def prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    Rank().main()
