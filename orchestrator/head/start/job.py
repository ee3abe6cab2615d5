"""Follow a job from its first attempt to its last, and start the attempts in between.

Stay.follow is the main loop. A head may join a running job, or leave before its end.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from orchestrator.common.errors import OrchestratorError
from orchestrator.config.launch import View
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import temporary_channel
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow.conclusion import end_of_attempt
from orchestrator.head.follow.monitors.job_line import JobLine
from orchestrator.head.follow.run import Backend, Run
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.head.follow.streams.node_logs import log_files, open_logs
from orchestrator.head.screen import styles
from orchestrator.head.screen.events import event_listener, tell
from orchestrator.head.screen.keyboard import Keyboard
from orchestrator.head.screen.screen import Display, Screen
from orchestrator.head.start.record import Running
from orchestrator.protocol.requests.start import Release
from orchestrator.protocol.timing import ANSWER_SECONDS, LOST_SECONDS
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord


@dataclass(frozen=True)
class JobEnding:
    """The result of a head's stay with a job: the last record, run and screen."""

    record: JobRecord
    # The last attempt that was followed, and the screen with its lines.
    run: Run | None = None
    screen: Screen | None = None

    @property
    def left(self) -> bool:
        return self.run is not None and self.run.end.left


@dataclass(frozen=True)
class FollowSession:
    """One head's stay with a job, over all its attempts."""

    experiment: Experiment
    transport: Transport
    backend: Callable[[JobRecord], Backend]
    view: View
    keys: Keyboard | None = None
    # True in a background process that a head started when it left.
    left_behind: bool = False
    # True for an observer: the job's lease does not depend on it.
    looks_on: bool = False

    def join(self, record: JobRecord) -> JobEnding:
        """Follow a job that is already running; do not show lines again that were shown before."""
        # The former head was lost before it could start the next attempt.
        if record.goes_on:
            following = self.start_next(record, {})
            if isinstance(following, JobRecord):
                return self.ended(JobEnding(following))
            return self.follow(following, self.screen_after(following.record))
        screen = make_screen(self.experiment, record, self.view, folds=True)
        screen.skip_to((None if self.view.quiet else self.experiment.take_shown()) or {})
        logs = open_logs(self.experiment, record.nodes)
        return self.follow(
            Running(self.experiment, self.transport, record, [None] * len(logs), logs), screen
        )

    def follow(self, attempt: Running, screen: Screen) -> JobEnding:
        """Follow an attempt and those after it, until the job is over or this head leaves."""
        while True:
            run = self.follow_one(attempt, screen)
            if run.end.left or not run.record.goes_on:
                return self.ended(JobEnding(run.record, run, screen))
            tell(end_of_attempt(self.experiment, run.record))
            following = self.start_next(run.record, run.channels)
            if isinstance(following, JobRecord):
                return self.ended(JobEnding(following, run, screen))
            attempt, screen = following, self.screen_after(following.record)

    def start_next(
        self, record: JobRecord, channels: Mapping[int, NodeChannel]
    ) -> Running | JobRecord:
        """Start the next attempt and return it, or return the record of a job that is over."""
        # Imported here because most jobs have only one attempt.
        from orchestrator.head.start.launch import launch_again

        return launch_again(self.experiment, record, self.transport, channels)

    def screen_after(self, record: JobRecord) -> Screen:
        """Return a screen for the next attempt, which skips the lines of the attempts before."""
        screen = make_screen(self.experiment, record, self.view, folds=True)
        screen.skip_to({node.index: node.log_before for node in record.nodes})
        return screen

    def follow_one(self, attempt: Running, screen: Screen) -> Run:
        """Follow one attempt to its end, or until this head leaves."""
        record, display = attempt.record, Display(screen)
        run = Run(
            self.experiment,
            record,
            display,
            self.backend(record),
            left_behind=self.left_behind,
        )
        followers = self.followers_of(run, attempt)
        display.screen.status = JobLine(run.job)
        display.start()
        try:
            with event_listener(draw=lambda event: display.show(event.styled_words())):
                run.go(followers, self.keys)
        except BaseException:
            self.experiment.unlock()
            raise
        finally:
            display.finish(fold=not run.end.open)
        return run

    def followers_of(self, run: Run, attempt: Running) -> list[NodeFollower]:
        record = run.record
        parts = zip(record.nodes, attempt.channels, attempt.logs, strict=True)
        return [
            NodeFollower(
                self.transport,
                record,
                node,
                self.experiment,
                run.post,
                channel,
                logs=opened,
                looks_on=self.looks_on,
            )
            for node, channel, opened in parts
        ]

    def ended(self, ending: JobEnding) -> JobEnding:
        """Release the nodes if the job is over, close the channels and unlock the experiment."""
        channels = ending.run.channels if ending.run is not None else {}
        if ending.record.over and (channels or ending.record.spares):
            release_job(ending.record, channels, self.transport)
        for channel in channels.values():
            channel.connection.close()
        self.experiment.unlock()
        return ending


def release_job(
    record: JobRecord, channels: Mapping[int, NodeChannel], transport: Transport
) -> None:
    """Remove the state that the job's attempts shared, on every node that they had.

    Lost nodes are asked as well, as one may be back. A node that stays away removes the state by
    itself after an hour (node/job/resume_dir.py).
    """
    every = (*record.nodes, *record.spares)
    held = {node.name: channels[node.index] for node in record.nodes if node.index in channels}
    away = [node for node in every if node.state == "lost" and node.name not in held]

    def tell(node: NodeRecord) -> None:
        ours = held.get(node.name)
        opened = contextlib.nullcontext(ours) if ours else temporary_channel(transport, node)
        with contextlib.suppress(OrchestratorError), opened as channel:
            channel.ask(Release(job=record.job, part=node.part), ANSWER_SECONDS)

    telling = fleet.start_thread(partial(fleet.map_parallel, away, tell))
    fleet.map_parallel([node for node in every if node not in away], tell)
    telling.join(LOST_SECONDS)


def make_screen(
    experiment: Experiment, record: JobRecord, view: View, *, folds: bool = False
) -> Screen:
    tty = sys.stdout.isatty()
    return Screen(
        log_files(experiment, record.nodes),
        sys.stdout,
        tty=tty,
        color=styles.colors_shown(),
        quiet=view.quiet,
        node=view.node,
        rank=view.rank,
        ranks=sum(node.nproc for node in record.nodes),
        folds=folds,
    )
