"""Trainer.launch: run a function in several processes on this machine and return its results.

Each process is a fresh Python, so a notebook that has used CUDA may launch, and no half-held lock
of the notebook's threads is inherited. Functions are sent with cloudpickle. A process ends when
the pipe from its parent does, whatever happened to the parent.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.common.errors import CheckFailed, JobFailed, UsageError
from orchestrator.node import pickled_functions

ROOT = str(Path(__file__).parents[3])
BEGIN = (
    "import sys; sys.path[:0] = sys.argv[1:2]; from orchestrator.engine.ranks import spawn;"
    " spawn.child()"
)
PATIENCE_SECONDS = 3.0  # between SIGTERM and SIGKILL for those that are left


class RankError(Exception):
    """The cause of what launch() raises: the trace of the rank it happened on."""


def launch(fn: Callable[..., Any], args: Sequence[Any], nprocs: int | None) -> list[Any]:
    count = number_of(nprocs)
    takes_rank = wants_rank(fn, args, count)
    blob = packed((sys.path, str(Path.cwd()), fn, takes_rank, tuple(args)))
    # The store lives here, so its port is known to be free, and no rank has to outlive the others.
    store: Any = vars(dist)["TCPStore"]("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children: list[Child] = []
    try:
        for rank in range(count):
            children.append(Child(rank, count, store.port, blob))
        return collect(children)
    finally:
        end(children)


def number_of(nprocs: int | None) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            f"this is rank {os.environ.get('RANK')} of {os.environ['WORLD_SIZE']} already",
            "call the function itself: launch() is for a single process",
        )
    gpus = torch.cuda.device_count()
    if nprocs is None and not gpus:
        raise UsageError("this machine has no GPU to count by", "say how many: nprocs=2")
    count = gpus if nprocs is None else nprocs
    if count < 1:
        raise UsageError(f"nprocs must be at least 1 (got {count})")
    if gpus and count > gpus:
        raise UsageError(f"nprocs is {count}, but there are {gpus} GPUs, one for each process")
    return count


def wants_rank(fn: Callable[..., Any], args: Sequence[Any], count: int) -> bool:
    """fn(rank, world_size, *args), or fn(*args) where it wants no more."""
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some builtins do not tell
        return True
    for takes_rank in (True, False):
        with contextlib.suppress(TypeError):
            signature.bind(*(0, count) * takes_rank, *args)
            return takes_rank
    raise UsageError(
        f"{getattr(fn, '__name__', fn)} takes {signature}; it is called with"
        f" (rank, world_size{''.join(f', {arg!r}' for arg in args)})"
    )


def packed(what: Any) -> bytes:
    """Pickle by value what only this process has: __main__, a notebook, an inner function."""
    fn, picklers = what[2], pickler()
    if picklers is pickle and (fn.__module__ == "__main__" or "<locals>" in fn.__qualname__):
        raise CheckFailed(
            f"sending {fn.__qualname__} to other processes needs cloudpickle",
            f"{sys.executable} -m pip install cloudpickle, or put the function into a module",
        )
    try:
        return bytes(picklers.dumps(what))
    except Exception as error:
        raise UsageError(
            f"the function cannot be sent to other processes: {error}",
            "create models, data and files inside it",
        ) from error


def pickler() -> Any:
    """Return what uses cloudpickle, or Python's own where it is missing."""
    return pickled_functions if importlib.util.find_spec("cloudpickle") else pickle


class Child:
    """One rank, seen from outside."""

    def __init__(self, rank: int, count: int, port: int, blob: bytes) -> None:
        self.rank, self.answer = rank, b""
        self.results, writing = os.pipe()
        env = {
            **os.environ,
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"},
            **{"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "GROUP_WORLD_SIZE": "1"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            **{"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"},
        }
        env.pop("ORCHESTRATOR_FIRST_WORLD_SIZE", None)  # of a job, whose ranks these are not
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
        command = [sys.executable, "-u", "-c", BEGIN, ROOT, str(writing)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[writing], env=env)
        os.close(writing)
        assert self.process.stdin is not None
        self.feeding = threading.Thread(target=self._feed, args=(blob,), daemon=True)
        self.feeding.start()  # a large one must not wait for the child's imports

    def _feed(self, blob: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; its result tells why
            self.process.stdin.write(len(blob).to_bytes(8, "big") + blob)
            self.process.stdin.flush()

    def result(self) -> Any:
        """Return what the rank returned, or raise what it raised."""
        code = self.process.wait()
        if not self.answer:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise JobFailed(
                f"rank {self.rank} ended with {how} and gave no result",
                "SIGKILL is usually the kernel, short of memory" if code == -9 else "",
            )
        good, value, trace = pickle.loads(self.answer)
        if good:
            return value
        raise value from RankError(f"on rank {self.rank}:\n\n{trace}")


def collect(children: Sequence[Child]) -> list[Any]:
    """Return the results by rank. The first failure is raised at once: the rest follows from it."""
    results: dict[int, Any] = {}
    with selectors.DefaultSelector() as waiting:
        for child in children:
            waiting.register(child.results, selectors.EVENT_READ, child)
        while len(results) < len(children):
            for key, _ in waiting.select():
                child = key.data
                piece = os.read(child.results, 1 << 20)
                child.answer += piece
                if not piece:
                    waiting.unregister(child.results)
                    results[child.rank] = child.result()
    return [results[rank] for rank in sorted(results)]


def end(children: Sequence[Child]) -> None:
    """Nothing is left, whatever happened."""
    alive = [child.process for child in children if child.process.poll() is None]
    for process in alive:
        process.terminate()
    deadline = time.monotonic() + PATIENCE_SECONDS
    for process in alive:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for child in children:
        os.close(child.results)
        with contextlib.suppress(OSError):
            assert child.process.stdin is not None
            child.process.stdin.close()


# -- in the child -----------------------------------------------------------------------------


def child() -> None:
    results, source = int(sys.argv[2]), os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with os.fdopen(source, "rb", buffering=0, closefd=False) as pipe:
        size = int.from_bytes(whole(pipe, 8), "big")
        blob = whole(pipe, size)
    threading.Thread(target=die_with_parent, args=(source,), daemon=True).start()
    result = outcome(blob)
    with os.fdopen(results, "wb") as writer:
        writer.write(result)


def whole(pipe: Any, size: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < size:
        piece = pipe.read(size - len(pieces))
        if not piece:
            os._exit(1)  # the parent is gone already
        pieces += piece
    return bytes(pieces)


def die_with_parent(source: int) -> None:
    os.read(source, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def outcome(blob: bytes) -> bytes:
    try:
        sys.argv = [""]
        path, directory, fn, takes_rank, args = pickle.loads(blob)
        sys.path[:] = path
        os.chdir(directory)
        place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        value = fn(*place * takes_rank, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        return bytes(pickler().dumps((True, value, "")))
    except BaseException as error:  # noqa: BLE001 (raised again, in the parent)
        trace = "".join(traceback.format_exception(error))
        try:
            result = bytes(pickler().dumps((False, error, trace)))
            pickle.loads(result)  # some exceptions can be sent and not be made again
        except Exception:  # noqa: BLE001
            result = pickle.dumps((False, JobFailed(f"{type(error).__name__}: {error}"), trace))
        return result
