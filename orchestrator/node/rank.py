"""What torchrun starts in place of the user's program: one rank, and its keeper.

torchrun's own child (the keeper) forks the real rank and waits for it, so that how the rank ended is
known exactly (exit code, signal, peak memory) whatever killed it; to torchrun the keeper ends the same
way. The rank sends its output down its own FIFO, so every line is known to be its own, and runs the
program as `python program args` would. Stands alone: it shares a process with the user's code, so it
imports nothing of ours.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import resource
import runpy
import signal
import sys
import time
import traceback
from types import FrameType, TracebackType
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# A device that only a live CUDA (uvm) or ROCm (kfd) context holds open; NVML alone does not.
CONTEXT_DEVICES = ("/dev/nvidia-uvm", "/dev/kfd")


class Rank:
    """One rank of the job described by the run directory's spec.json."""

    def __init__(self) -> None:
        self.run = os.environ["ORCHESTRATOR_RUN"]
        with open(os.path.join(self.run, "spec.json"), encoding="ascii") as file:
            self.spec: dict[str, Any] = json.load(file)
        self.rank = int(os.environ["RANK"])
        self.local = int(os.environ["LOCAL_RANK"])

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
        forked = self.spec["start"] == "fork" and "ORCHESTRATOR_AFRESH" not in os.environ
        touched = touched_device() if forked else ""
        if touched:
            self.report(event="afresh", why=touched)
            os.environ["ORCHESTRATOR_AFRESH"] = "1"
            os.execv(sys.executable, [sys.executable, "-u", os.path.abspath(__file__)])
        self.take_output()
        child = os.fork()
        if child:
            self.keep(child)
        self.run_program()

    def take_output(self) -> None:
        fifo = os.open(os.path.join(self.run, f"out_{self.local}"), os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(fifo, 1)
        os.dup2(fifo, 2)
        os.close(fifo)
        # As on a terminal: whole lines leave in one write, so lines of two threads do not tear.
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]

    def keep(self, child: int) -> None:
        """Wait for the rank, report its end, end the same way. Never returns."""

        def forward(signum: int, frame: FrameType | None) -> None:
            try:
                os.kill(child, signum)
            except ProcessLookupError:
                pass

        for signum in FORWARDED:
            signal.signal(signum, forward)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        self.report(event="started", pid=child, keeper=os.getpid())
        _, status, usage = os.wait4(child, 0)
        code = os.waitstatus_to_exitcode(status)
        self.report(event="ended", pid=child, code=code, peak_kb=usage.ru_maxrss)
        if code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has dumped its core already
            signal.signal(-code, signal.SIG_DFL) if -code not in (9, 19) else None
            os.kill(os.getpid(), -code)
        os._exit(code if code >= 0 else 1)

    def run_program(self) -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_NAME, f"rank{self.rank}".encode())
        os.environ.pop("ORCHESTRATOR_AFRESH", None)
        # A forked rank inherits torchrun's handlers, which would turn a SIGTERM into an exception.
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if hasattr(atexit, "_clear"):
            atexit._clear()  # what torchrun's agent registered is not ours to run
        target = self.spec["target"]
        try:
            os.chdir(self.spec["workdir"])
            if target["kind"] == "program":
                os.execvp(target["name"], [target["name"], *target["args"]])
            import faulthandler

            faulthandler.enable()
            run_python(target["kind"], target["name"], target["args"])
        except SystemExit as leaving:
            if leaving.code not in (0, None):
                self.report(event="exit", code=str(leaving.code)[:1000])
                raise
        except KeyboardInterrupt:
            sys.exit(130)
        except BaseException as error:
            self.record(error)
            sys.exit(1)
        # A forked child of multiprocessing leaves by os._exit, which would skip what the program
        # registered; run again at a normal exit this finds nothing left to do.
        sys.stdout.flush()
        atexit._run_exitfuncs()
        self.report(event="finished")

    def record(self, error: BaseException) -> None:
        """The traceback without our own frames: to the log, to us, and to torchelastic's error file."""
        first = users_frames(error.__traceback__)
        text = "".join(traceback.format_exception(type(error), error, first))
        sys.stdout.flush()
        sys.stderr.write(text)
        sys.stderr.flush()
        frames = traceback.extract_tb(first)
        here = users_line(frames)
        message = f"{type(error).__name__}: {error}"
        record = {
            "type": type(error).__name__,
            "message": str(error)[:20000],
            "traceback": text[-60000:],
            "time": time.time(),
            "file": here.filename if here else "",
            "line": here.lineno if here else 0,
            "function": here.name if here else "",
            "code": (here.line or "") if here else "",
        }
        write_json(os.path.join(self.run, f"error_{self.local}.json"), record)
        elastic = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if elastic and not os.path.exists(elastic):
            stamp = str(int(time.time()))
            extra = {"py_callstack": text[-60000:], "timestamp": stamp}
            write_json(elastic, {"message": {"message": message[:20000], "extraInfo": extra}})


def touched_device() -> str:
    """Why this forked process may not use the GPU, or nothing: its parent holds a device context."""
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


def run_python(kind: str, name: str, args: list[str]) -> None:
    """As `python name args` (kind "script") or `python -m name args` (a module) would."""
    sys.argv = [name, *args]
    if kind in ("module", "engine"):
        library = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        sys.path[0] = library if kind == "engine" else os.getcwd()
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(name))
        runpy.run_path(name, run_name="__main__")


def users_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's own first frame on."""
    while frames is not None:
        name = frames.tb_frame.f_code.co_filename
        if name != __file__ and "runpy" not in name and "pathlib" not in name:
            return frames
        frames = frames.tb_next
    return None


def users_line(frames: traceback.StackSummary) -> traceback.FrameSummary | None:
    """The innermost line that is the user's own: not in an installed package, not in the library."""
    library = os.path.dirname(os.__file__)
    own = [
        frame
        for frame in frames
        if "site-packages" not in frame.filename
        and "dist-packages" not in frame.filename
        and not frame.filename.startswith((library, "<"))
    ]
    return own[-1] if own else (frames[-1] if frames else None)


def write_json(path: str, record: dict[str, Any]) -> None:
    try:
        with open(path + ".tmp", "w", encoding="ascii") as file:
            json.dump(record, file)
        os.replace(path + ".tmp", path)
    except OSError as error:
        sys.stderr.write(f"orchestrator: the error could not be recorded in {path}: {error}\n")


def prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    Rank().main()
