"""Ask all nodes, or do the same work for all at once; name every failure in one table."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from orchestrator.common.errors import NodeError, OrchestratorError, UsageError
from orchestrator.common.hosts import folded
from orchestrator.common.text import table
from orchestrator.head.connect import tasks
from orchestrator.head.nodes.facts import by_value

if TYPE_CHECKING:
    from orchestrator.head.connect.channel import NodeChannel
    from orchestrator.head.connect.reach import Reached
    from orchestrator.protocol.message import Message
    from orchestrator.protocol.requests.request import Request

log = logging.getLogger(__name__)

SPARE = 16
A_CONNECTION = 2  # open files: one, and one more while it is made
MORE_FILES = "allow more: ulimit -n 65536, or by its hard limit in /etc/security/limits.conf"
MANY = 16  # nodes of which each has no line of its own


def raise_limit() -> None:
    """Raise the limit as far as this login may; most systems begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def room() -> int:
    """Return how many more this process may open."""
    try:
        return limit() - sum(1 for _ in os.scandir("/proc/self/fd"))
    except OSError:  # not even that
        return 0


def need_room(files: int, what: str) -> None:
    """Raise an error where this process may not open so many more files."""
    raise_limit()
    if room() < SPARE + files:
        said = f"{what}: {limit()} files are all that this process may open"
        raise UsageError(said, MORE_FILES)


def need_room_for(nodes: Sequence[object]) -> None:
    """Raise an error where this process may not open connections to all these nodes."""
    need_room(A_CONNECTION * len(nodes), f"{len(nodes)} nodes cannot be connected to at once")


N = TypeVar("N")
T = TypeVar("T")
V = TypeVar("V")
R = TypeVar("R")
A = TypeVar("A", bound="Message")


class Named(Protocol):
    """A node, by whatever is known of it."""

    @property
    def name(self) -> str: ...


class Answering(Protocol):
    """A node that was reached."""

    @property
    def channel(self) -> NodeChannel: ...


M = TypeVar("M", bound=Named)


def everywhere(items: Sequence[T], work: Callable[[T], R]) -> list[R | OrchestratorError]:
    """Do work(item) for all items at once; return each one's result or its error, in order."""
    raise_limit()
    results: list[R | OrchestratorError | None] = [None] * len(items)
    crashes: list[BaseException] = []

    def run(index: int, item: T) -> None:
        try:
            results[index] = attempt(partial(work, item))
        except BaseException as error:
            log.debug("a defect in work for %s", getattr(item, "name", "one"), exc_info=error)
            if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
                crashes.append(error)
            results[index] = NodeError("no more files may be opened here", MORE_FILES)

    begun = [tasks.WORK.start(partial(run, index, item)) for index, item in enumerate(items)]
    for task in begun:
        task.join()  # Ctrl-C leaves at once, and with the process the connections close
    if crashes:
        raise crashes[0]
    for item, result in zip(items, results, strict=True):
        if isinstance(result, OrchestratorError):
            log.debug("%s: %s", getattr(item, "name", "one"), result)
    return cast("list[R | OrchestratorError]", results)


def failures(
    nodes: Sequence[M], results: Sequence[R | OrchestratorError]
) -> list[tuple[M, OrchestratorError]]:
    """Return the nodes that failed, each with its error."""
    pairs = zip(nodes, results, strict=True)
    return [(node, result) for node, result in pairs if isinstance(result, OrchestratorError)]


def all_or_table(
    nodes: Sequence[Named],
    results: Sequence[R | OrchestratorError],
    then: str,
    total: int | None = None,
) -> list[R]:
    """Return the results, or raise one error that names every node that failed, of how many."""
    failed = failures(nodes, results)
    if failed:
        raise NodeError(failure_table(failed, total or len(nodes), then))
    return [result for result in results if not isinstance(result, OrchestratorError)]


def failure_table(failed: Sequence[tuple[M, OrchestratorError]], total: int, then: str) -> str:
    """Name every node that failed, its error and, once for those that fail alike, the fix."""
    rows = []
    for what, fix, names in alike((node.name, error.what, error.fix) for node, error in failed):
        rows += [(name, what) for name in names]
        if fix:
            rows.append(("", f"  -> {fix}"))
    lines = [f"{len(failed)} of {total} nodes cannot be used{then}"]
    lines += [f"  {line}" for line in table(rows)]
    return "\n".join(lines)


def reasons(failed: Iterable[tuple[str, str, str]]) -> list[str]:
    """Name why each node failed, and what to type; unwrapped, as fixes are to be copied."""
    lines = []
    for what, fix, names in alike(failed):
        lines += [*(f"{name}: {what}" for name in names), *[f"  -> {fix}"] * bool(fix)]
    return lines


def alike(failed: Iterable[tuple[str, str, str]]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each error once: what and fix, and the nodes that have it; many of them folded."""
    for what, fix, names in kinds(failed):
        yield what, fix, few(names)


def kinds(failed: Iterable[tuple[N, V, str]]) -> Iterator[tuple[V, str, list[N]]]:
    """Yield what went wrong, its fix, and the nodes of it.

    Many fixes that name their own node have one example; those of a few are all there to copy.
    """
    for what, nodes in by_value(((node, fix), what) for node, what, fix in failed).items():
        if len(nodes) > MANY:
            yield what, for_all([fix for _, fix in nodes]), [node for node, _ in nodes]
        else:
            for fix, those in by_value(nodes).items():
                yield what, fix, those


def for_all(fixes: Sequence[str]) -> str:
    """Return the fix of nodes that fail alike: where each has its own, the first, as an example."""
    return fixes[0] if len(set(fixes)) == 1 else f"{fixes[0]}  # for each of them, with its name"


def few(names: list[str]) -> list[str]:
    """Return names to show: many of them as one, folded."""
    return [folded(names)] if len(names) > MANY else names


def ask(
    reached: Sequence[Answering], requests: Sequence[Request[A]], timeout: float
) -> list[A | OrchestratorError]:
    """Ask each node its own request; return its answer or its error, in order."""
    return ask_channels([node.channel for node in reached], requests, timeout)


def ask_channels(
    channels: Sequence[NodeChannel], requests: Sequence[Request[A]], timeout: float
) -> list[A | OrchestratorError]:
    """Do so over open channels.

    All questions are out before the first answer is waited for: the nodes answer at once, and
    whoever asks thousands needs no task for each.
    """
    pairs = list(zip(channels, requests, strict=True))
    numbers: list[int | OrchestratorError] = []
    for way, some in itertools.groupby(pairs, key=lambda pair: pair[0].way):
        with way.together() if way else nullcontext():
            numbers += [attempt(partial(channel.post, request)) for channel, request in some]
    since = time.monotonic()
    return [
        number
        if isinstance(number, OrchestratorError)
        else attempt(partial(channel.wait_for, number, request, timeout, since))
        for number, (channel, request) in zip(numbers, pairs, strict=True)
    ]


def attempt(work: Callable[[], R]) -> R | OrchestratorError:
    """Return what it returns, or the error that it raises."""
    try:
        return work()
    except OrchestratorError as error:
        return error


def ask_all(
    reached: Sequence[Reached], requests: Sequence[Request[A]], timeout: float, then: str
) -> list[A]:
    """Ask each node its own request; one error names every node that failed."""
    answers = ask(reached, requests, timeout)
    return all_or_table([node.node for node in reached], answers, then)
