"""Has a node take files from another, and follows that to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from orchestrator.common.errors import NodeError
from orchestrator.protocol.requests.transfer import AskTaken, Taken

if TYPE_CHECKING:
    from orchestrator.head.connect.channel import NodeChannel
    from orchestrator.protocol.requests.request import Nothing, Request

QUICK_SECONDS = 30.0  # for an answer that needs no work: a node that is very busy is not lost


def take(
    channel: NodeChannel,
    request: Request[Nothing],
    came: Callable[[int], None],
    give_up: Callable[[int], bool],
    lock: AbstractContextManager[object] = nullcontext(),  # noqa: B008  it has no state
) -> Taken:
    """Return how much came, and why the rest did not. came() hears of the bytes.

    give_up() gets how many there are; the node ends its taking when it says so, or raises.
    """
    with lock:
        channel.ask(request, QUICK_SECONDS)
    seen = 0
    try:
        while True:
            if give_up(seen):
                end(channel, lock)
            with lock:
                taken = channel.ask(AskTaken(), QUICK_SECONDS)
            came(max(0, taken.size - seen))
            seen = max(seen, taken.size)
            if taken.over:
                return taken
    except NodeError:
        raise
    except BaseException:
        with contextlib.suppress(NodeError):
            end(channel, lock)
        raise


def end(channel: NodeChannel, lock: AbstractContextManager[object]) -> None:
    with lock:
        channel.ask(AskTaken(end=True), QUICK_SECONDS)
