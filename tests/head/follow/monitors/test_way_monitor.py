"""When a job makes way: whichever node it is asked on, once its first one has kept something."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.config.launch import Launch
from orchestrator.head.follow.job_end import Change
from orchestrator.head.follow.monitors.way_monitor import WayMonitor
from orchestrator.protocol.requests.start import AskWanted, Wanted
from orchestrator.records.experiment import PREEMPTED, JobRecord

RECORD = JobRecord(
    "run-1", "run_1", "running", ["x"], [], 1.0, launch=Launch(max_restarts=1, claim="all")
)
ASKED, ALONE = Wanted(by="ada's urgent"), Wanted()


class Follower:
    def __init__(self, index: int) -> None:
        self.node, self.asked = SimpleNamespace(index=index), list[AskWanted]()

    def ask(self, request: AskWanted) -> None:
        self.asked.append(request)


def watched(record: JobRecord, answers: dict[int, Wanted]) -> tuple[Change | None, list[str], int]:
    said = list[str]()
    monitor = WayMonitor(cast(Any, SimpleNamespace(record=record, say=said.append)))
    followers = [Follower(0), Follower(1)]
    assert monitor.check(cast(Any, followers)) is None
    for node, answer in answers.items():
        monitor.answer(node, answer)
    change = [monitor.check(cast(Any, followers)) for _ in range(2)][-1]
    return change, said, sum(len(follower.asked) for follower in followers)


@pytest.mark.parametrize("asked", [0, 1])
def test_it_is_asked_on_any_of_its_nodes(asked: int) -> None:
    answers = {0: ALONE.replace(kept=True), 1: ALONE}
    answers[asked] = answers[asked].replace(by="ada's urgent")
    change, said, questions = watched(RECORD, answers)
    assert change == Change(PREEMPTED, "it makes way for ada's urgent", [])
    assert not said and questions == 2


def test_who_has_kept_nothing_says_so_once() -> None:
    change, said, _ = watched(RECORD, {0: ALONE, 1: ASKED})
    assert change is None and len(said) == 1 and "it has kept nothing" in said[0]
    assert watched(RECORD, {1: ASKED})[:2] == (None, [])  # nobody knows yet


@pytest.mark.parametrize("launch", [Launch(claim="all"), Launch(max_restarts=1, claim="none")])
def test_who_would_not_come_back_or_holds_nothing_is_not_asked(launch: Launch) -> None:
    answers = {0: Wanted(by="ada's urgent", kept=True)}
    assert watched(replace(RECORD, launch=launch), answers) == (None, [], 0)
