"""All that watches a running job, and what is done about what it sees."""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING

from orchestrator.head.follow.followed_job import FollowedJob
from orchestrator.head.follow.monitors.hang_monitor import HangMonitor
from orchestrator.head.follow.monitors.start_monitor import DIALS_WITHIN_SECONDS, StartMonitor
from orchestrator.head.follow.streams.news import Answer
from orchestrator.protocol.requests.follow import Stuck
from orchestrator.records.outcome import SlowRank

if TYPE_CHECKING:
    from orchestrator.head.follow.monitors.slow_monitor import SlowMonitor


class Monitors:
    """Watches a job whose nodes are all connected, until its end begins."""

    def __init__(self, job: FollowedJob) -> None:
        self.job, record = job, job.record
        limit = record.launch.hang_timeout
        self.hang = HangMonitor(limit, job.experiment, record.job, job.say)
        # With a short limit the hang itself is found first, and is what was asked for.
        self.start = StartMonitor("" if 0 < limit < DIALS_WITHIN_SECONDS else record.master)
        self.left_hanging = False

    @cached_property
    def slow(self) -> SlowMonitor:
        from orchestrator.head.follow.monitors.slow_monitor import SlowMonitor  # not at a start

        outputs = self.job.experiment.path / "outputs"
        return SlowMonitor(self.job.record.nodes, outputs, self.held_up)

    def held_up(self, slow: SlowRank) -> None:
        self.job.held_up(slow.replace(time=time.time()))
        self.job.warn(slow.text)

    def answer(self, news: Answer) -> None:
        """Pass an answer on to the monitor that has asked."""
        monitor = self.hang if isinstance(news.answer, Stuck) else self.start
        monitor.answer(news.node, news.answer)

    def check(self) -> None:
        job = self.job
        if not job.end.open or self.left_hanging or any(node.lost_since for node in job.nodes):
            return
        begun = any(node.ranks for node in job.nodes)
        if unmet := self.start.check(job.at_work, begun=begun):
            job.failed(unmet)
            return
        self.slow.check()
        hang = self.hang.check(job.at_work)
        if hang is not None and job.record.launch.on_hang == "stop":
            job.failed(hang)
        elif hang is not None:
            self.left_hanging = True
            job.warn(f"{hang.message}; left as it is (on_hang: leave)")
