"""All that watches a running job, and what is done about what it sees."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from orchestrator.head.follow.followed_job import FollowedJob
from orchestrator.head.follow.monitors.dial_monitors import (
    DIALS_WITHIN_SECONDS,
    OPEN_ALL,
    LinkMonitor,
    StartMonitor,
)
from orchestrator.head.follow.monitors.hang_monitor import HangMonitor
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.head.follow.streams.news import Answer
from orchestrator.head.follow.verdict import Failure
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.follow import Paces, Stuck
from orchestrator.protocol.requests.machine import Dialed, Listening
from orchestrator.records.outcome import SlowRank

if TYPE_CHECKING:
    from orchestrator.head.follow.monitors.slow_monitor import SlowMonitor

LINK_FIX = f"look at the cables and the switch between these nodes, or {OPEN_ALL}"


class Monitors:
    """Watches a job whose nodes are all connected, until its end begins."""

    def __init__(self, job: FollowedJob) -> None:
        self.job, record = job, job.record
        limit = record.launch.hang_timeout
        self.hang = HangMonitor(limit, job.experiment, record.job, job.say)
        # With a short limit the hang itself is found first, and is what was asked for.
        self.start = StartMonitor("" if 0 < limit < DIALS_WITHIN_SECONDS else record.master)
        self.link = LinkMonitor(record.nodes)
        self.stuck: Failure | None = None  # a hang, until it is known who reaches whom
        self.left_hanging = False

    @cached_property
    def slow(self) -> SlowMonitor:
        from orchestrator.head.follow.monitors.slow_monitor import SlowMonitor  # not at a start

        record, outputs = self.job.record, self.job.experiment.path / "outputs"
        return SlowMonitor(record.job, record.nodes, outputs, self.held_up)

    def held_up(self, slow: SlowRank) -> None:
        self.job.held_up(slow.replace(time=time.time()))
        self.job.warn(slow.text)

    def answer(self, news: Answer) -> None:
        """Pass an answer on to the monitor that has asked."""
        asking: dict[type[Message], Callable[[int, Any], None]] = {
            Stuck: self.hang.answer,
            Paces: self.slow.answer,
            Listening: self.link.answer,
            Dialed: (self.link if self.start.over else self.start).answer,
        }
        asking[type(news.answer)](news.node, news.answer)

    def check(self) -> None:
        job = self.job
        if not job.end.open or self.left_hanging or any(node.lost_since for node in job.nodes):
            return
        followers, begun = job.at_work, any(node.ranks for node in job.nodes)
        if unmet := self.start.check(followers, begun=begun):
            job.failed(unmet)
            return
        apart = self.link.check(followers, begun=begun or self.stuck is not None)
        if apart and self.stuck is None:
            job.warn(f"WARNING: {apart}; {OPEN_ALL}")
        self.slow.check(followers)
        failure = self.hanging(followers, apart)
        if failure is not None and job.record.launch.on_hang == "stop":
            job.failed(failure)
        elif failure is not None:
            self.left_hanging = True
            job.warn(f"{failure.message}; left as it is (--on-hang leave)")

    def hanging(self, followers: Sequence[NodeFollower], apart: str) -> Failure | None:
        """Return a hang; where no rank explains it, once it is known who reaches whom."""
        if self.stuck is None:
            failure = self.hang.check(followers)
            if failure is None or failure.node is not None or len(followers) < 2:
                return failure
            self.stuck = failure
            self.link = LinkMonitor(self.job.record.nodes, at_once=True)
        if not self.link.over:
            return None
        failure, self.stuck = self.stuck, None
        node = self.link.most_apart
        if not apart or node is None:
            return failure
        message = f"{failure.message}; {apart}"
        return replace(failure, node=node.index, node_name=node.name, message=message, fix=LINK_FIX)
