"""The base of what watches a job: steps that ask its nodes and pause, and never wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Generic, TypeVar

from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.protocol.requests.request import Request

ANSWER_SECONDS = 10.0  # nodes that have not answered by then are left out

T = TypeVar("T")


class Watcher(Generic[T]):
    """Runs watch(), a generator that yields for how many seconds it pauses and returns a finding.

    The head calls check() ten times a second, and answer() for what the nodes say.
    """

    def __init__(self, after: float = 0.0) -> None:
        self.followers: Sequence[NodeFollower] = ()  # of the nodes that are asked
        self.answers: dict[int, Any] = {}  # node -> its answer to the latest question
        self.due_at = time.monotonic() + after
        self.steps = self.watch()
        self.over = False

    def watch(self) -> Generator[float, None, T | None]:
        raise NotImplementedError

    def check(self, followers: Sequence[NodeFollower]) -> T | None:
        """Go on once a pause is over; return what was found, once."""
        self.followers, now = followers, time.monotonic()
        if self.over or now < self.due_at:
            return None
        try:
            self.due_at = now + next(self.steps)
        except StopIteration as end:
            self.over = True
            found: T | None = end.value
            return found
        return None

    def answer(self, node: int, answer: Any) -> None:
        self.answers[node] = answer

    def ask(self, question: Callable[[NodeFollower], Request[Any]]) -> None:
        """Ask every node; the answers come while this pauses."""
        self.answers = {}
        for follower in self.followers:
            follower.ask(question(follower))

    def ask_and_hear(self, question: Callable[[NodeFollower], Request[Any]]) -> Iterator[float]:
        """Ask every node, and pause until all have answered or ANSWER_SECONDS have passed."""
        self.ask(question)
        until = time.monotonic() + ANSWER_SECONDS
        while len(self.answers) < len(self.followers) and time.monotonic() <= until:
            yield 0.0
