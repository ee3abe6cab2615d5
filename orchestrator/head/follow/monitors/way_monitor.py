"""Notices that a launch of higher priority asks for what a job holds, which then makes way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.head.follow.followed_job import FollowedJob
from orchestrator.head.follow.job_end import Change
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.protocol.requests.start import AskWanted, Wanted
from orchestrator.records.experiment import PREEMPTED

EVERY = 2.0  # seconds


@dataclass
class WayMonitor:
    """Asks the nodes of a job that resumes by itself, and has their answers."""

    job: FollowedJob
    due_at: float = 0.0
    answers: dict[int, Wanted] = field(default_factory=dict)  # node -> the latest
    told: str = ""

    def answer(self, node: int, wanted: Wanted) -> None:
        self.answers[node] = wanted

    def check(self, followers: Sequence[NodeFollower]) -> Change | None:
        """Return why the job makes way, once it has kept something to go on from; never waits."""
        launch, record, now = self.job.record.launch, self.job.record, time.monotonic()
        if not launch.max_restarts or launch.claim == "none" or record.head_elsewhere:
            return None
        if now >= self.due_at:
            self.due_at = now + EVERY
            for follower in followers:
                follower.ask(AskWanted(job=record.job, node=follower.node.index))
        by = next((answer.by for answer in self.answers.values() if answer.by), "")
        first = self.answers.get(0)
        if not by or first is None:
            return None
        if first.kept:
            return Change(PREEMPTED, f"it makes way for {by}", record.spares)
        if by != self.told:
            self.told = by
            words = "it has kept nothing that it could go on from, and runs on"
            self.job.say(f"{by} asks this job to make way: {words}")
        return None
