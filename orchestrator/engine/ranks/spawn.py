"""Trainer.launch: run a function in several processes on this machine and return its results.

torch.multiprocessing starts fresh Pythons, so a program that has used CUDA may launch. Functions
are sent with cloudpickle. A process ends when its parent does.
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from orchestrator.common.errors import JobFailed, UsageError
from orchestrator.node import pickled_functions


class SpawnError(Exception):
    """The cause of an error of launch(): the stack trace of the rank that failed."""


def launch(fn: Callable[..., Any], args: Sequence[Any], nprocs: int | None) -> list[Any]:
    count = number_of(nprocs)
    takes_rank = wants_rank(fn, args, count)
    blob = pickle_function((fn, takes_rank, tuple(args)))
    # This process hosts the store: its port is free, and no rank has to outlive the others.
    store: Any = vars(dist)["TCPStore"]("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        try:
            start_processes(run_rank, (count, store.port, blob, place), count, start_method="spawn")
        except ProcessRaisedException as error:
            rank = error.error_index
            raise pickle.loads((place / str(rank)).read_bytes()) from SpawnError(error.msg)
        except ProcessExitedException as error:
            how = error.signal_name or f"exit code {error.exit_code}"
            raise JobFailed(
                f"rank {error.error_index} ended with {how} and returned no result",
                "SIGKILL is usually the kernel, short of memory" if how == "SIGKILL" else "",
            ) from None
        return [pickle.loads((place / str(rank)).read_bytes()) for rank in range(count)]


def number_of(nprocs: int | None) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            f"this is rank {os.environ.get('RANK')} of {os.environ['WORLD_SIZE']} already",
            "call the function itself: launch() is for a single process",
        )
    gpus = torch.cuda.device_count()
    if nprocs is None and not gpus:
        raise UsageError("this machine has no GPU to count by", "pass their number: nprocs=2")
    count = gpus if nprocs is None else nprocs
    if count < 1:
        raise UsageError(f"nprocs must be at least 1 (got {count})")
    return count


def wants_rank(fn: Callable[..., Any], args: Sequence[Any], count: int) -> bool:
    """Return True if fn takes (rank, world_size, *args), False if it takes only *args."""
    try:
        signature = inspect.signature(fn)
    except ValueError:
        # Some builtins have no signature.
        return True
    for takes_rank in (True, False):
        with contextlib.suppress(TypeError):
            signature.bind(*(0, count) * takes_rank, *args)
            return takes_rank
    raise UsageError(
        f"{getattr(fn, '__name__', fn)} takes {signature}; it is called with"
        f" (rank, world_size{''.join(f', {arg!r}' for arg in args)})"
    )


def pickle_function(what: Any) -> bytes:
    """Pickle the function, by value if it is of __main__, a notebook or another function."""
    try:
        return pickled_functions.dumps(what)
    except Exception as error:
        raise UsageError(
            f"the function cannot be sent to other processes: {error}",
            "create models, data and files inside it",
        ) from error


# -- in the child -----------------------------------------------------------------------------


def run_rank(rank: int, count: int, port: int, blob: bytes, place: Path) -> None:
    """Run the function as this rank. Write its result or exception into a file."""
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"},
        **{"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "GROUP_WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **{"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"},
    )
    # It belongs to the ranks of a job, which these are not.
    os.environ.pop("ORCHESTRATOR_FIRST_WORLD_SIZE", None)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        fn, takes_rank, args = pickle.loads(blob)
        value = fn(*(rank, count) * takes_rank, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        (place / str(rank)).write_bytes(pickled_functions.dumps(value))
    except Exception as error:
        (place / str(rank)).write_bytes(as_sent(error))
        raise


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def as_sent(error: Exception) -> bytes:
    """Pickle an exception, or its text if it cannot be unpickled."""
    try:
        result = pickled_functions.dumps(error)
        pickle.loads(result)
    # Pickling a class of the user's may raise anything.
    except Exception:  # noqa: BLE001
        return pickle.dumps(JobFailed(f"{type(error).__name__}: {error}"))
    return result
