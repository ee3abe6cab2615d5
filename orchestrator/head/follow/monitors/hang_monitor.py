"""Notices a job that hangs, and finds out why."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import replace

from orchestrator.common import files
from orchestrator.common.text import Say
from orchestrator.head.follow.monitors import hang_report
from orchestrator.head.follow.monitors.hang_report import StuckRank
from orchestrator.head.follow.monitors.watcher import Watcher
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.head.follow.verdict import Failure
from orchestrator.protocol.requests.follow import AskStuck, RankStacks
from orchestrator.records.experiment import Experiment

STOOD_STILL = 1.0  # between two looks, which come ten times a second


class HangMonitor(Watcher[Failure]):
    """A job hangs when none of its nodes printed anything or moved for `timeout` seconds.

    A program that reports no steps and keeps its processors busy may be waiting all the same (NCCL
    spins). After such a silence its ranks are asked too, and the age of a collective decides.
    """

    def __init__(self, timeout: float, experiment: Experiment, job: str, say: Say) -> None:
        super().__init__()
        self.timeout, self.experiment, self.job, self.say = timeout, experiment, job, say
        self.over = not timeout
        self.settled_at = self.checked_at = time.monotonic()

    def check(self, followers: Sequence[NodeFollower]) -> Failure | None:
        """Return what is wrong, once it is known."""
        before, self.checked_at = self.checked_at, time.monotonic()
        if self.checked_at - before > STOOD_STILL:
            self.settled_at = self.checked_at
        return super().check(followers)

    def watch(self) -> Generator[float, None, Failure]:
        while True:
            silent = min((f.silent for f in self.followers), default=0.0)
            known = min(silent, time.monotonic() - self.settled_at)
            if known > self.timeout:
                yield from self.ask_and_hear(self.question)
                self.settled_at = time.monotonic()
                if failure := self.failure():
                    return failure
            yield 0.0

    @property
    def idle(self) -> float:
        return min((follower.idle for follower in self.followers), default=0.0)

    def question(self, follower: NodeFollower) -> AskStuck:
        return AskStuck(job=self.job, node=follower.node.index)

    def heard(self) -> tuple[list[tuple[StuckRank, RankStacks]], StuckRank | None, str]:
        """Return the ranks that nodes tell of, the one to look at first, and what that means."""
        asked = [f.node for f in self.followers if f.node.index in self.answers]
        ranks = [
            (hang_report.of_rank(rank, node.index, stacks), stacks)
            for node in asked
            for rank, stacks in sorted(self.answers[node.index].stuck.items())
            if rank in node.numbers
        ]
        stuck = [rank for rank, _ in ranks]
        return ranks, hang_report.culprit(stuck), hang_report.reading(stuck)

    def failure(self) -> Failure | None:
        ranks, who, reading = self.heard()
        # Each by the clock of its own node: another's may be far off.
        waits = (hang_report.oldest_wait([r], self.answers[r.node].time) for r, _ in ranks)
        idle = self.idle
        if idle <= self.timeout and max(waits, default=0.0) <= self.timeout:
            return None  # busy with something that says nothing
        if ranks:
            self._keep(ranks)
        message = f"no progress for {max(idle, self.timeout):.0f} s: {reading}"
        fix = hang_report.fix([rank for rank, _ in ranks])
        found = Failure(None, "", None, time.time(), "hang", message, fix=fix)
        if who is None:
            return found
        names = {f.node.index: f.node.name for f in self.followers}
        return replace(found, node=who.node, node_name=names[who.node], rank=who.rank)

    def _keep(self, ranks: Sequence[tuple[StuckRank, RankStacks]]) -> None:
        directory = self.experiment.path / "hang"
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            for rank, stacks in ranks:
                path = directory / f"node_{rank.node}_rank_{rank.rank}_stacks.txt"
                files.replace(path, stacks.stacks.encode("utf-8", "replace"))
                if stacks.collectives:
                    path = path.with_name(f"node_{rank.node}_rank_{rank.rank}_collectives.json")
                    files.replace(path, stacks.collectives.encode("utf-8", "replace"))
            self.say(f"the stacks and collectives of all ranks are in {directory}")
        except OSError as error:
            self.say(f"{directory} cannot be written: {error.strerror}")
