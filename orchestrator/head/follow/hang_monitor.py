"""Notices a job that stands still, and finds out why. Asked by the run at every turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.errors import NodeError
from orchestrator.head.follow import hang_report
from orchestrator.head.follow.follower import Follower
from orchestrator.head.follow.hang_report import Stuck
from orchestrator.head.follow.verdict import Failure
from orchestrator.records.experiment import Experiment

ANSWER_SECONDS = 10.0  # nodes that have not told by then are left out


class Watch:
    """A job stands still when no node of it printed or moved for `timeout` seconds.

    A program that tells no steps and keeps its processors busy may be waiting all the same (NCCL
    spins): silent for so long, its ranks are asked too, and a collective as old as that decides.
    """

    def __init__(
        self, timeout: float, experiment: Experiment, job: str, say: Callable[[str], None]
    ) -> None:
        self.timeout, self.experiment, self.job, self.say = timeout, experiment, job, say
        self.asked_at = 0.0
        self.settled_at = time.monotonic()
        self.told: dict[int, dict[str, Any]] = {}

    def look(self, followers: Sequence[Follower]) -> Failure | None:
        """What is wrong, once it is known."""
        now = time.monotonic()
        if not self.timeout:
            return None
        if self.asked_at:
            if len(self.told) == len(followers) or now - self.asked_at > ANSWER_SECONDS:
                return self._settle(followers, now)
            return None
        silent = min((f.activity.get("silent", 0.0) for f in followers), default=0.0)
        if silent > self.timeout and now - self.settled_at > self.timeout:
            self._ask(followers, now)
        return None

    def _ask(self, followers: Sequence[Follower], now: float) -> None:
        self.asked_at, self.told = now, {}
        for follower in followers:
            link = follower.link
            try:
                if link is not None:
                    link.tell("stuck", job=self.job, node=follower.node.index)
            except NodeError:
                continue  # its follower notices and says so

    def answer(self, node: int, data: dict[str, Any]) -> None:
        self.told[node] = data

    def _settle(self, followers: Sequence[Follower], now: float) -> Failure | None:
        self.asked_at, self.settled_at = 0.0, now
        ranks = [
            (hang_report.of_rank(int(rank), node, found), found)
            for node, told in sorted(self.told.items())
            for rank, found in sorted(told["stuck"].items(), key=lambda item: int(item[0]))
        ]
        stuck = [one for one, _ in ranks]
        # Clocks of nodes differ; a wait of minutes is one by any of them.
        clock = max((told["time"] for told in self.told.values()), default=0.0)
        idle = min((f.activity.get("idle", 0.0) for f in followers), default=0.0)
        if idle <= self.timeout and hang_report.oldest_wait(stuck, clock) <= self.timeout:
            return None  # busy with something that says nothing
        if ranks:
            self._keep(ranks)
        fix = "" if ranks else "orchestrator doctor: does every node reach the master's port?"
        words = f"no progress for {max(idle, self.timeout):.0f} s: {hang_report.reading(stuck)}"
        who = hang_report.culprit(stuck)
        node = who.node if who else followers[0].node.index
        name = next(f.node.name for f in followers if f.node.index == node)
        rank = who.rank if who else None
        return Failure(node, name, rank, time.time(), "hang", words, fix=fix)

    def _keep(self, ranks: Sequence[tuple[Stuck, dict[str, Any]]]) -> None:
        place = self.experiment.path / "hang"
        try:
            place.mkdir(exist_ok=True)
            for one, found in ranks:
                path = place / f"node_{one.node}_rank_{one.rank}_stacks.txt"
                path.write_text(found["stacks"], encoding="utf-8")
                if found["collectives"]:
                    path = path.with_name(f"node_{one.node}_rank_{one.rank}_collectives.json")
                    path.write_text(found["collectives"], encoding="utf-8")
            self.say(f"the stacks and collectives of all ranks are in {place}")
        except OSError as error:
            self.say(f"{place} cannot be written: {error.strerror}")
