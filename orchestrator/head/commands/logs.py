"""`orchestrator logs`: show the logs of a job, running or over."""

from __future__ import annotations

import queue
import time

from orchestrator.common.errors import EXIT_DONE
from orchestrator.config.launch import View, Where
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.head.follow.streams.news import Failed, News, Over
from orchestrator.head.schedulers.backend import SshBackend
from orchestrator.head.start.job import make_screen
from orchestrator.head.status import status
from orchestrator.head.status.find_job import find_job
from orchestrator.records.experiment import Experiment, JobRecord


def logs(where: Where, wanted: str | None, view: View, *, follow: bool, last: int | None) -> int:
    job = find_job(where, wanted)
    record = job.backend.begun(job.experiment, job.record, wait=follow)
    record.check_choice(view.node, view.rank, "--{} {}")
    screen = make_screen(job.experiment, record, view)
    fetcher = LogFetcher(job.experiment, record, job.transport, job.backend)
    over = not follow
    if not record.over and (over or last is not None):
        fetcher.catch_up()
    elif not record.over:
        fetcher.begin()
    if last is not None:
        screen.begin_near_end(last)
    while screen.pump() or not (over or screen.broken):
        over = over or fetcher.over(wait=0.2)
    screen.close()
    fetcher.end()
    return EXIT_DONE


# -- catch up -----------------------------------------------------------------------------------
# Fetches the logs of a job for an onlooker, unless a head does so already.

CATCH_UP_SECONDS = 60.0
ASK_SECONDS = 5.0  # between two questions to a scheduler, which has many to answer


class LogFetcher:
    """Fetches the logs, unless the job is over or a head fills the files."""

    def __init__(
        self, experiment: Experiment, record: JobRecord, ssh: Transport, backend: SshBackend
    ) -> None:
        self.experiment = experiment
        self.record = record
        self.ssh = ssh
        self.backend = backend
        self.inbox: queue.SimpleQueue[News] = queue.SimpleQueue()
        self.followers: list[NodeFollower] = []
        self.finished: set[int] = set()
        self.next_ask = time.monotonic() + ASK_SECONDS

    def begin(self) -> None:
        if self.record.head_elsewhere or self.experiment.lock() is not None:
            return
        self.followers = [
            NodeFollower(
                self.ssh,
                self.record.job,
                node,
                self.experiment,
                self.inbox.put,
                former_end=self.record.former_end,
                among=len(self.record.nodes),
            )
            for node in self.record.nodes
        ]
        for follower in self.followers:
            follower.start()

    def over(self, wait: float) -> bool:
        """Wait for news; return whether all is over."""
        if self.followers and self.experiment.successor() is not None:
            self.end()  # a head comes, and will fill the files in our place
        if not self.followers:
            time.sleep(0 if self.record.over else wait)
            self.record = self.experiment.read_record()
            if time.monotonic() >= self.next_ask:
                self.next_ask = time.monotonic() + ASK_SECONDS
                self.record = self.backend.settle(self.experiment, self.record)
            return self.record.over
        try:
            news = self.inbox.get(timeout=wait)
        except queue.Empty:
            return False
        if isinstance(news, Failed):
            raise news.error
        if isinstance(news, Over):
            self.finished.add(news.node)
        return len(self.finished) == len(self.followers)

    def catch_up(self) -> None:
        """Wait until the files here hold what the nodes had when asked."""
        if self.record.head_elsewhere:
            return
        states = status.ask_nodes(self.ssh, self.record)
        self.begin()
        deadline = time.monotonic() + CATCH_UP_SECONDS
        wanted = [
            (follower, state.log_bytes)
            for follower, state in zip(self.followers, states, strict=False)
            if state.log_bytes is not None
        ]
        while any(follower.text.size < size for follower, size in wanted):
            if self.over(wait=0.2) or time.monotonic() > deadline:
                break

    def end(self) -> None:
        for follower in self.followers:
            follower.close()
        self.followers = []
        self.experiment.unlock()
