"""Read the newest state of each thing once, however many clients look on.

Nobody has a queue. A client that is slow is given the newest state when it is ready for it, and
what nobody looks at is not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor

from orchestrator.common.errors import UsageError

SLOWEST = 10.0  # a look is repeated after so many times its own length: at most 9% of a core


class Topic:
    """One thing that clients look at, and the task that reads it while any do."""

    def __init__(
        self,
        render: Callable[[], bytes | None],
        every: float,
        threads: Executor,
        rest: Callable[[], None] = lambda: None,  # once nobody looks any more
    ) -> None:
        self.render, self.rest = render, rest
        self.every = every
        self.threads = threads
        self.value = b""
        self.problem = ""  # why it cannot be read
        self.version = 0
        self.readers = 0
        self.used = time.monotonic()  # by whoever was last
        self.rendered_at = 0.0
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.looking = asyncio.Lock()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while self.readers:
            took = await self.once()
            await asyncio.sleep(max(self.every, SLOWEST * took))
            if not self.readers:
                await loop.run_in_executor(self.threads, self.rest)

    async def once(self, oldest: float = -1.0) -> float:
        """Look once, and wake up everybody if it is not what it was; return how long it took.

        Whoever waits for somebody else's look takes what that has found, if it is no older.
        """
        async with self.looking:
            begin = time.monotonic()
            if self.rendered_at and begin - self.rendered_at <= oldest:
                return 0.0
            loop = asyncio.get_running_loop()
            problem = self.problem
            value = await loop.run_in_executor(self.threads, self.guarded)
            self.rendered_at = time.monotonic()
            fresh = value is not None and value != self.value
            if fresh or self.problem != problem:
                self.value = value if value is not None else self.value
                self.version += 1
                before, self.changed = self.changed, asyncio.Event()
                before.set()
        return time.monotonic() - begin

    def guarded(self) -> bytes | None:
        try:
            value = self.render()
        except UsageError as error:
            self.problem = error.what
        except OSError as error:
            self.problem = error.strerror or type(error).__name__
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # a damaged file
            self.problem = f"its files cannot be read ({type(error).__name__})"
        else:
            self.problem = ""
            return value
        return None

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Keep it fresh for one client more."""
        self.readers += 1
        if self.task is None or self.task.done():
            self.task = asyncio.get_running_loop().create_task(self.run())
        try:
            yield
        finally:
            self.readers -= 1
            self.used = time.monotonic()

    async def fresh(self, oldest: float) -> bytes:
        """Return a state that is no older than that, for one that does not stay."""
        await self.once(oldest)
        self.used = time.monotonic()
        return self.value


async def either(first: asyncio.Event, second: asyncio.Event | None, seconds: float) -> None:
    """Wait until one of two has happened, or for so long."""
    events = [event for event in (first, second) if event is not None]
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def event(name: str, data: bytes) -> bytes:
    """Write one server-sent event; the data are one line of JSON."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


async def following(topic: Topic, name: str, seconds: float) -> AsyncIterator[bytes]:
    """Give each state of a topic that this client is quick enough for."""
    seen = 0
    with topic.reading():
        while True:
            if topic.version == seen:
                changed = topic.changed
                await either(changed, None, seconds)
            if topic.version == seen:
                yield b": still here\n\n"
            else:
                seen = topic.version
                problem = json.dumps(topic.problem).encode()
                yield event("problem", problem) if topic.problem else event(name, topic.value)
