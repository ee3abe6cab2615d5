"""Sends requests to all nodes, or runs work for all at once; reports failures in one table."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError, UsageError
from orchestrator.head.screen import failures

if TYPE_CHECKING:
    from orchestrator.head.connect.channel import NodeChannel
    from orchestrator.head.connect.reach import Reached
    from orchestrator.protocol.message import Message
    from orchestrator.protocol.requests.request import Request

SPARE = 16
MOST_FILES = 1 << 16
# Open files for each connection: one, and one more while it is opened.
A_CONNECTION = 2
# Threads for each node: of its connection, its follower, and its requests.
THREADS = 3
MORE_FILES = "allow more: ulimit -n 65536, or by its hard limit in /etc/security/limits.conf"
MORE_THREADS = (
    "allow more: ulimit -u unlimited, TasksMax= of its unit, --pids-limit of its container; or, for"
    " so many nodes, start through Slurm: --nodes-from slurm"
)


def need_open_files(files: int, what: str) -> None:
    """Raise UsageError if this process cannot open `files` more files.

    The soft limit is raised to the hard limit first; most systems begin with 1,024.
    """
    now, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else max(now, min(hard, MOST_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        has_open = sum(1 for _ in os.scandir("/dev/fd"))
    except OSError:
        # The limit is reached: this directory cannot be opened either.
        has_open = most
    if most - has_open < SPARE + files:
        raise UsageError(f"{what}: this process may open only {most} files", MORE_FILES)


def need_room_for_nodes(nodes: Sequence[object]) -> None:
    """Raise UsageError if the limits on files and threads are too low for all these nodes."""
    what = f"{len(nodes)} nodes cannot be connected to at once"
    need_open_files(A_CONNECTION * len(nodes), what)
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limited = os.geteuid() and most != resource.RLIM_INFINITY
    if limited and most < THREADS * len(nodes) + SPARE:
        raise UsageError(
            f"{what}: this login may have only {most} processes and threads", MORE_THREADS
        )


T = TypeVar("T")
R = TypeVar("R")
A = TypeVar("A", bound="Message")


class Answering(Protocol):
    """A node with an open channel."""

    @property
    def channel(self) -> NodeChannel: ...


def map_parallel(items: Sequence[T], work: Callable[[T], R]) -> list[R | OrchestratorError]:
    """Run work(item) for all items in parallel; return each result or error, in order."""
    results: list[R | OrchestratorError | None] = [None] * len(items)
    crashes: list[BaseException] = []

    def run(index: int, item: T) -> None:
        try:
            results[index] = try_call(partial(work, item))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                crashes.append(error)
            results[index] = NodeError("this process may open no more files", MORE_FILES)
        # A defect of this program: the caller raises it again.
        except BaseException as error:  # noqa: BLE001
            crashes.append(error)

    begun = [start_thread(partial(run, index, item)) for index, item in enumerate(items)]
    for thread in begun:
        # Ctrl-C leaves at once; the connections close with the process.
        thread.join()
    if crashes:
        raise crashes[0]
    return cast("list[R | OrchestratorError]", results)


def start_thread(work: Callable[[], object]) -> threading.Thread:
    """Start work in a daemon thread."""
    thread = threading.Thread(target=work, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise CheckFailed("this process may start no more threads", MORE_THREADS) from error
    return thread


def ask_nodes(
    reached: Sequence[Answering], requests: Sequence[Request[A]], timeout: float
) -> list[A | OrchestratorError]:
    """Send each node its own request; return each answer or error, in order."""
    return ask_channels([node.channel for node in reached], requests, timeout)


def ask_channels(
    channels: Sequence[NodeChannel], requests: Sequence[Request[A]], timeout: float
) -> list[A | OrchestratorError]:
    """Send each channel its own request; return each answer or error, in order.

    All requests are sent before the first answer is awaited. The nodes answer in parallel, and
    thousands of nodes need no thread each.
    """
    pairs = list(zip(channels, requests, strict=True))
    numbers = [try_call(partial(channel.post, request)) for channel, request in pairs]
    since = time.monotonic()
    return [
        number
        if isinstance(number, OrchestratorError)
        else try_call(partial(channel.wait_for, number, request, timeout, since))
        for number, (channel, request) in zip(numbers, pairs, strict=True)
    ]


def try_call(work: Callable[[], R]) -> R | OrchestratorError:
    """Return the result of work(), or the OrchestratorError that it raises."""
    try:
        return work()
    except OrchestratorError as error:
        return error


def ask_all(
    reached: Sequence[Reached], requests: Sequence[Request[A]], timeout: float, then: str
) -> list[A]:
    """Send each node its own request; return the answers, or raise one error for all failures."""
    answers = ask_nodes(reached, requests, timeout)
    return failures.results_or_error([node.node for node in reached], answers, then)
