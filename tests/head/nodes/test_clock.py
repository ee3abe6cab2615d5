"""Messages about the times of a node whose clock is wrong."""

from __future__ import annotations

import time

import pytest

from orchestrator.head.nodes import clock
from orchestrator.protocol.facts import Checkup, Holder, Load, User
from orchestrator.protocol.requests.follow import JobState, JobStates
from orchestrator.protocol.requests.machine import CheckedUp

HOURS = 3600.0


@pytest.mark.parametrize("off", [0.0, -2 * HOURS, 3 * HOURS])
def test_times_of_a_node_are_by_our_clock(off: float) -> None:
    now = time.time()
    theirs = now + off
    job = JobState(
        job="a", node=0, state="running", ranks={}, started=theirs - 60, log_time=theirs - 5
    )
    (moved,) = clock.jobs_now(JobStates(jobs=(job,), time=theirs)).jobs
    assert (moved.started, moved.log_time, moved.ended) == (near(now - 60), near(now - 5), None)
    user = User(user="u", job="a", cores=1.0, memory=1, processes=1, name="p", pid=1,
                since=theirs - 60)  # fmt: skip
    holders = (Holder(1, "", "p", since=theirs - 60), Holder(2, "", "p"))
    checkup = Checkup(holders=holders, load=Load(cores=1.0, users=(user,)))
    seen = clock.checkup_now(CheckedUp(checkup=checkup, time=theirs))
    assert seen.load is not None and seen.holders is not None
    assert [each.since for each in (*seen.load.users, *seen.holders)] == [
        *(near(now - 60), near(now - 60), None)
    ]
    assert clock.checkup_now(CheckedUp(checkup=Checkup(), time=theirs)) == Checkup()


def test_a_clock_that_is_right_changes_nothing() -> None:
    """Else what began at one moment would change places from look to look."""
    user = User(user="u", job="a", cores=1.0, memory=1, processes=1, name="p", pid=1, since=5.0)
    answer = CheckedUp(checkup=Checkup(load=Load(1.0, (user,))), time=time.time() - 1)
    assert clock.checkup_now(answer) == answer.checkup


def near(moment: float) -> object:
    return pytest.approx(moment, abs=30.0)
