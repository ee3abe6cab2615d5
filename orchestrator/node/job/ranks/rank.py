"""Runs one rank: torchrun starts this in place of the user's program.

torchrun's own child (the keeper) forks the real rank and waits for it. So the exit code, signal and
peak memory are known exactly in every case, and the keeper ends
the same way for torchrun. The rank sends its output to its own FIFO, so each line is its own, and
runs the program as `python program args` would. It shares a process with the user's code, so at run
time it imports nothing of this package; interpreter.py beside it is loaded by its path.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import importlib.machinery
import importlib.util
import json
import os
import re
import resource
import runpy
import signal
import sys
import time
import traceback
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn


def loaded(*path: str) -> Any:
    """Load a file of this package without an entry in sys.modules, which the program would see."""
    place = os.path.join(os.path.dirname(__file__), *path) + ".py"
    module = types.ModuleType("orchestrator_" + path[-1])
    importlib.machinery.SourceFileLoader(module.__name__, place).exec_module(module)
    return module


if TYPE_CHECKING:
    from orchestrator.node.job.ranks import interpreter
else:
    interpreter = loaded("interpreter")

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
HELD = (*FORWARDED, signal.SIGQUIT)
# Equal to the constant in protocol/timing.py.
STACKS_SIGNAL = signal.SIGRTMIN + 9
# Equal to the constant in common/errors.py.
NO_RESTART = 93
# A failed program has this long to end: an experiment tracker may still send data.
LEAVING_SECONDS = 60.0
# Within this time a running supervisor has noticed that a rank failed, and ends the others.
SUPERVISOR_SECONDS = 1.0
# These files wrap calls of every program.
HOOKS = ("sitecustomize.py", "usercustomize.py")
# run_python(), and the functions of runpy between it and the program.
RUNPY_FRAMES = 4
# Frames of these files are not the user's: rank.py itself, and runpy.
OURS = (os.path.dirname(__file__) + os.sep, runpy.__file__, "<frozen ")


class Rank:
    """One rank of the job described by the run directory's spec.json."""

    def __init__(self) -> None:
        self.run = os.environ["ORCHESTRATOR_RUN"]
        with open(os.path.join(self.run, "spec.json"), encoding="ascii") as file:
            self.spec: dict[str, Any] = json.load(file)
        self.rank = int(os.environ["RANK"])
        self.local = int(os.environ["LOCAL_RANK"])
        # True if forked from torchrun's agent, which has imported torch; else it is a new Python.
        self.forked = False

    def report(self, report: dict[str, Any]) -> None:
        """Send a line to the supervisor. It is shorter than PIPE_BUF, so lines never mix."""
        line = json.dumps({"rank": self.rank, "local": self.local, "time": time.time(), **report})
        # The supervisor has ended.
        with contextlib.suppress(OSError):
            fd = os.open(os.path.join(self.run, "reports"), os.O_WRONLY | os.O_NONBLOCK)
            os.write(fd, line.encode() + b"\n")
            os.close(fd)

    def main(self) -> None:
        self.forked = self.spec["start"] == "fork"
        self.take_output()
        # torch interrupts its children when torchrun dies. Here the supervisor ends them, once it
        # knows the cause.
        prctl(PR_SET_PDEATHSIG, 0)
        # Blocked until both processes have their own handlers. torchrun's would raise in the wrong
        # place, and a newly forked rank would ignore a request to stop.
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
        child = os.fork()
        if child:
            self.keep(child)
            return
        # A signal that the program sends to its own group must reach only it and its children.
        os.setsid()
        # Reported before any output, so that the supervisor knows which process to signal.
        self.report({"event": "started", "pid": os.getpid(), "keeper": os.getppid()})
        self.run_program()

    def take_output(self) -> None:
        fifo = os.open(os.path.join(self.run, f"out_{self.local}"), os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(fifo, 1)
        os.dup2(fifo, 2)
        os.close(fifo)

    def keep(self, child: int) -> None:
        """Wait for the rank, report its end, then end the same way (return if it succeeded).

        A process that torchrun forked must return: torchrun would wait for its value forever.
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
        _, status, usage = os.wait4(child, 0)
        code = os.waitstatus_to_exitcode(status)
        for signum in FORWARDED:
            signal.signal(signum, signal.SIG_DFL)
        self.report({"event": "ended", "pid": child, "code": code, "peak_kb": usage.ru_maxrss})
        # If torchrun saw the failure now, it would kill ranks that save. The supervisor ends them.
        ending, until = os.path.join(self.run, "ending"), time.monotonic() + SUPERVISOR_SECONDS
        while code and (os.path.exists(ending) or time.monotonic() < until):
            time.sleep(0.05)
        if code < 0:
            # The rank has already dumped its core.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(-code, signal.SIG_DFL) if -code not in (9, 19) else None
            os.kill(os.getpid(), -code)
        if code:
            os._exit(code if code > 0 else 1)

    def run_program(self) -> NoReturn:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_NAME, f"rank{self.rank}".encode())
        answer_by_default()
        code = 0
        complete_environment(os.environ, self.spec)
        try:
            if self.forked:
                interpreter.forget_the_parent()
            self.run_target()
        except SystemExit as leaving:
            code = self.exit_code(leaving)
            if code:
                self.store(leaving, users_frames(leaving.__traceback__))
        # The program may raise anything.
        except BaseException as error:  # noqa: BLE001
            self.record(error)
            code = 130 if isinstance(error, KeyboardInterrupt) else 1
            # The class is compared by name, as orchestrator.NoRestart is not imported here.
            kinds = ((kind.__module__, kind.__name__) for kind in type(error).__mro__)
            if ("orchestrator.common.errors", "NoRestart") in kinds:
                code = NO_RESTART
        self.leave(code)

    def leave(self, code: int) -> NoReturn:
        """End as the interpreter does. A forked rank uses os._exit: torchrun's frames are below."""
        if code:
            _thread.start_new_thread(end_in_time, (code,))
        interpreter.end_threads_and_exit_functions()
        if code == 0:
            self.report({"event": "finished"})
        interpreter.write_files()
        if self.forked:
            os._exit(code)
        sys.exit(code)

    def run_target(self) -> None:
        target = self.spec["target"]
        os.chdir(self.spec["workdir"])
        # A shell sets PWD at `cd`.
        os.environ["PWD"] = self.spec["workdir"]
        if target["kind"] == "program":
            # Python ignores these signals; other programs expect the default.
            for signum in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(signum, signal.SIG_DFL)
            os.execvp(target["name"], [target["name"], *target["args"]])
        import faulthandler

        faulthandler.enable()
        self.stand_by(faulthandler.register)
        # The frames below the program's own, of torchrun and of runpy, take nothing from its limit.
        below = sum(1 for _ in traceback.walk_stack(None)) + RUNPY_FRAMES
        sys.setrecursionlimit(sys.getrecursionlimit() + below)
        run_python(target["kind"], target["name"], target["args"])

    def stand_by(self, register: Callable[..., Any]) -> None:
        """Prepare to report this rank's position if the job hangs.

        On a signal, the main thread's stack is written, even while C code holds the interpreter.
        Stacks of other threads are not: reading that of a running thread can crash the process.
        On a byte in the FIFO, a thread unknown to `threading` writes torch's recorded collectives:
        the main thread may be blocked forever.
        """
        # torch 2.8 and 2.9 record none by default.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        with contextlib.suppress(OSError):
            path = os.path.join(self.run, f"stacks_{self.local}")
            self.stacks = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            register(STACKS_SIGNAL, self.stacks, all_threads=False)
            questions = os.path.join(self.run, f"ask_{self.local}")
            os.mkfifo(questions, 0o600)
            # Kept open: without a reader a write to the FIFO would fail.
            _thread.start_new_thread(self.answer_questions, (os.open(questions, os.O_RDWR),))

    def answer_questions(self, questions: int) -> None:
        path = os.path.join(self.run, f"collectives_{self.local}.json")
        while True:
            os.read(questions, 4096)
            write_whole(path, "\n".join(recorded()))

    def exit_code(self, leaving: SystemExit) -> int:
        """Return the exit code: a number is the code itself, text is an error message."""
        if leaving.code is None or isinstance(leaving.code, int):
            code = (leaving.code or 0) & 0xFF
            if code:
                self.report({"event": "exit", "code": str(leaving.code)})
            return code
        message = str(leaving.code)
        # A character takes at most 12 bytes, so the line stays below PIPE_BUF.
        self.report({"event": "exit", "code": self.hiding()(message)[:300]})
        sys.stdout.flush()
        sys.stderr.write(message + "\n")
        return 1

    def record(self, error: BaseException) -> None:
        """Print the traceback without frames of this package, and store it for the supervisor."""
        first = users_frames(error.__traceback__)
        error.__traceback__ = first
        sys.stdout.flush()
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, first
        # The program may have set its own hook.
        sys.excepthook(type(error), error, first)
        sys.stderr.flush()
        self.store(error, first)

    def store(self, error: BaseException, first: TracebackType | None) -> None:
        """Store an exception for the supervisor, with the place that raised it."""
        here = users_line(traceback.extract_tb(first))
        hide = self.hiding()
        text = "".join(traceback.format_exception(type(error), error, first))
        record = {
            "type": type(error).__name__,
            # The exception's own __str__ may raise.
            "message": hide(str(traceback.TracebackException(type(error), error, None)))[:20000],
            "traceback": hide(text)[-60000:],
            "time": time.time(),
            "pid": os.getpid(),
            "file": here.filename if here else "",
            "line": (here.lineno or 0) if here else 0,
            "function": here.name if here else "",
        }
        if not write_whole(os.path.join(self.run, f"error_{self.local}.json"), json.dumps(record)):
            words = {n: v[:150] if isinstance(v, str) else v for n, v in record.items()}
            # The values are cut so that the line stays below PIPE_BUF.
            self.report({"event": "raised", "error": words})

    def hiding(self) -> Callable[[str], str]:
        """Return a function that removes this job's secrets from a text, as the supervisor does."""
        module = loaded(os.pardir, os.pardir, os.pardir, "common", "hiding")
        env = {**os.environ, **self.spec.get("env", {})}
        secrets = module.secrets_of_environment(env, self.spec.get("secrets", ()))
        return lambda text: module.hide_secrets(text, secrets)


def end_in_time(code: int) -> None:
    """End a program that has failed, even if one of its threads or processes never ends.

    Other ranks wait for this one, and its failure is reported once it has ended.
    """
    time.sleep(LEAVING_SECONDS)
    sys.stderr.write(
        "orchestrator: the program has failed, and its threads, processes and exit functions did"
        f" not end within {LEAVING_SECONDS:g} s: its process is ended\n"
    )
    os._exit(code)


def recorded() -> Iterator[str]:
    """Yield torch's flight recorder dumps: NCCL has one, all other backends share another."""
    for dump in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        # The program has no torch, or its torch has no recorder.
        with contextlib.suppress(Exception):
            yield getattr(sys.modules["torch"]._C._distributed_c10d, dump)().decode()


def answer_by_default() -> None:
    """Undo torchrun's handlers, which would turn a SIGTERM to a forked rank into an exception."""
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


def run_python(kind: str, name: str, args: list[str]) -> None:
    """Run as `python name args` (kind "script") or `python -m name args` (a module) would."""
    sys.argv = [name, *args]
    flag = ["-m"] if kind in ("module", "engine") else []
    # Otherwise `ps` would show torchrun's agent instead of the script.
    interpreter.show_command([sys.executable, "-u", *flag, *sys.argv])
    if not getattr(sys.flags, "safe_path", False):
        # This entry is the directory of rank.py.
        del sys.path[0]
    library = os.path.abspath(__file__).rsplit(os.sep, 5)[0]
    # Lets the program import orchestrator, for example the Trainer.
    if importlib.util.find_spec("orchestrator") is None:
        sys.path.append(library)
    path = os.path.join(os.getcwd(), name)
    if kind == "engine":
        sys.path.insert(0, library)
    elif not getattr(sys.flags, "safe_path", False) and (flag or os.path.isfile(path)):
        sys.path.insert(0, os.getcwd() if flag else os.path.dirname(os.path.realpath(path)))
    if flag:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    # run_path() searches a directory by itself.
    else:
        runpy.run_path(path, run_name="__main__")


def users_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the program's own first frame on."""
    while frames and frames.tb_frame.f_code.co_filename.startswith(OURS):
        frames = frames.tb_next
    return frames


def users_line(frames: traceback.StackSummary) -> traceback.FrameSummary | None:
    """Return the innermost line that is the user's, outside installed packages and this library."""
    # The Trainer's frames belong to this package, not to the user.
    package = getattr(sys.modules.get("orchestrator"), "__file__", None)
    library = (os.path.dirname(package) + os.sep,) if package else ()
    installed = (*OURS, *library, os.path.dirname(os.__file__), "<")
    lines = [
        frame
        for frame in frames
        if not frame.filename.startswith(installed)
        and not re.search("(site|dist)-packages|torchinductor", frame.filename)
        and os.path.basename(frame.filename) not in HOOKS
    ]
    # A program that is installed itself: its own package, not the libraries that it calls.
    own = re.match(".*(site|dist)-packages/[^/]+", frames[0].filename) if frames else None
    of_own = [frame for frame in frames if own and frame.filename.startswith(own[0])]
    shown = lines or of_own or list(frames)
    return shown[-1] if shown else None


def write_whole(path: str, text: str) -> bool:
    """Write a file with all of this text; return False, without a file, if the disk is full."""
    # Another thread may write the same file.
    new = f"{path}.{_thread.get_ident()}.tmp"
    with contextlib.suppress(OSError):
        with open(new, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.replace(new, path)
        return True
    return False


# With OWN, the program starts its ranks by itself.
SLURM, OWN = "slurm", "own"
OF_TORCHRUN = re.compile(
    r"TORCHELASTIC_.*|(LOCAL|GROUP|ROLE)_.*|TORCH_NCCL_ASYNC_ERROR_HANDLING|NPROC_PER_NODE"
)
# A variable of Slurm's that a user or an allocation has set stays, if it is no rank or size.
OF_A_JOB = tuple(
    f"SLURM_{name}" for name in ("JOB_ID", "JOBID", "JOB_NAME", "CPUS_PER_TASK", "GPUS_ON_NODE")
)


def complete_environment(environ: MutableMapping[str, str], spec: Mapping[str, Any]) -> None:
    """Set the variables that a launch asked for: add Slurm's, or remove torchrun's."""
    wanted, restarts = spec.get("rank_env", ()), spec.get("restarts")
    # torchrun sets these for its own restarts.
    if restarts:
        environ["TORCHELASTIC_RESTART_COUNT"] = str(spec["attempt"] - 1)
        environ["TORCHELASTIC_MAX_RESTARTS"] = str(restarts)
    if SLURM in wanted:
        of_job = {name: environ[name] for name in OF_A_JOB if name in environ}
        environ.update({**of_slurm(environ, spec), **of_job})
    # The variables of the rendezvous address stay.
    if OWN in wanted:
        for name in [name for name in environ if OF_TORCHRUN.fullmatch(name)]:
            del environ[name]


def of_slurm(environ: Mapping[str, str], spec: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that srun sets for a task."""
    hosts, node = spec.get("hosts", ()), int(spec["node"])
    job = str(1 + zlib.crc32(spec["job"].encode()) % 10**7)
    per_node, size, nodes = environ["LOCAL_WORLD_SIZE"], environ["WORLD_SIZE"], str(spec["nnodes"])
    cores = max(1, len(os.sched_getaffinity(0)) // int(per_node))
    found = {
        **{"PROCID": environ["RANK"], "LOCALID": environ["LOCAL_RANK"], "NODEID": str(node)},
        **{"NTASKS": size, "NPROCS": size, "NNODES": nodes, "JOB_NUM_NODES": nodes},
        **{"JOB_ID": job, "JOBID": job, "JOB_NAME": spec["experiment"]},
        **{"NODELIST": ",".join(hosts), "JOB_NODELIST": ",".join(hosts)},
        **{"CPUS_PER_TASK": str(cores), "GPUS_ON_NODE": per_node},
    }
    if int(size) == int(per_node) * spec["nnodes"]:
        found["NTASKS_PER_NODE"] = per_node
    return {f"SLURM_{name}": value for name, value in found.items()}


def prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    Rank().main()
