"""Notices a job that hangs, and finds out why."""

from __future__ import annotations

import time
from collections.abc import Sequence

from orchestrator.common import files
from orchestrator.common.text import Say
from orchestrator.head.follow.monitors import hang_report
from orchestrator.head.follow.monitors.hang_report import StuckRank
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.head.follow.verdict import Failure
from orchestrator.protocol.requests.follow import AskStuck, RankStacks, Stuck
from orchestrator.records.experiment import Experiment

ANSWER_SECONDS = 10.0  # nodes that have not answered by then are left out
FIRST_WORD_SECONDS = 60.0  # without progress; where that is at most half of what counts as a hang
STOOD_STILL = 1.0  # between two looks, which come ten times a second


class HangMonitor:
    """A job hangs when none of its nodes printed anything or moved for `timeout` seconds.

    A program that reports no steps and keeps its processors busy may be waiting all the same (NCCL
    spins). After such a silence its ranks are asked too, and the age of a collective decides.
    Of a first minute in which nothing moves, one line is said, and nothing follows.
    """

    def __init__(self, timeout: float, experiment: Experiment, job: str, say: Say) -> None:
        self.timeout, self.experiment, self.job, self.say = timeout, experiment, job, say
        self.asked_at = 0.0
        self.early = False  # whether the question is the first, after a minute
        self.first_said = timeout < 2 * FIRST_WORD_SECONDS
        self.settled_at = self.checked_at = time.monotonic()
        self.answers: dict[int, Stuck] = {}

    def check(self, followers: Sequence[NodeFollower]) -> Failure | None:
        """Return what is wrong, once it is known."""
        now, before = time.monotonic(), self.checked_at
        self.checked_at = now
        if now - before > STOOD_STILL:
            self.settled_at = now
        if not self.timeout:
            return None
        if self.asked_at:
            if len(self.answers) == len(followers) or now - self.asked_at > ANSWER_SECONDS:
                return self._settle(followers, now)
            return None
        silent = min((f.silent for f in followers), default=0.0)
        known = now - self.settled_at
        if silent > self.timeout and known > self.timeout:
            self._ask(followers, now)
        elif not self.first_said and min(silent, known) > FIRST_WORD_SECONDS:
            idle = min((f.idle for f in followers), default=0.0)
            if idle > FIRST_WORD_SECONDS:
                self._ask(followers, now, early=True)
        return None

    def _ask(self, followers: Sequence[NodeFollower], now: float, *, early: bool = False) -> None:
        self.asked_at, self.early, self.answers = now, early, {}
        for follower in followers:
            follower.ask(AskStuck(job=self.job, node=follower.node.index))

    def answer(self, node: int, stuck: Stuck) -> None:
        self.answers[node] = stuck

    def _settle(self, followers: Sequence[NodeFollower], now: float) -> Failure | None:
        self.asked_at = 0.0
        if not self.early:
            self.settled_at = now
        ranks = [
            (hang_report.of_rank(rank, f.node.index, stacks), stacks)
            for f in followers
            if f.node.index in self.answers
            for rank, stacks in sorted(self.answers[f.node.index].stuck.items())
            if rank in f.node.numbers
        ]
        stuck = [rank for rank, _ in ranks]
        # Each by the clock of its own node: another's may be far off.
        waits = (hang_report.oldest_wait([r], self.answers[r.node].time) for r in stuck)
        idle = min((f.idle for f in followers), default=0.0)
        asked = [f.node for f in followers if f.node.index in self.answers]
        ended = max(0, sum(node.nproc for node in asked) - len(stuck)) if stuck else 0
        reading = hang_report.reading(stuck, ended)
        if self.early:
            if idle > FIRST_WORD_SECONDS:  # still
                self.first_said = True
                self._say_first(idle, reading, hang_report.culprit(stuck, ended))
            return None
        if idle <= self.timeout and max(waits, default=0.0) <= self.timeout:
            return None  # busy with something that says nothing
        if ranks:
            self._keep(ranks)
        message = f"no progress for {max(idle, self.timeout):.0f} s: {reading}"
        who = hang_report.culprit(stuck, ended)
        names = {f.node.index: f.node.name for f in followers}
        node, rank = (who.node, who.rank) if who else (None, None)
        name = "" if node is None else names[node]
        return Failure(node, name, rank, time.time(), "hang", message, fix=hang_report.fix(stuck))

    def _say_first(self, idle: float, reading: str, who: StuckRank | None) -> None:
        whose = f"rank {who.rank}: " if who else ""
        self.say(
            f"nothing was printed and nothing moves for {idle:.0f} s: {whose}{reading}; after"
            f" {self.timeout:.0f} s (--hang-timeout) that is a hang"
        )

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
