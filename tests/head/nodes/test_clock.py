"""Messages about the times of a node whose clock is wrong."""

from typing import TypeVar

import pytest

from orchestrator.protocol import events
from orchestrator.protocol.facts import Checkup, Holder, Load, User
from orchestrator.protocol.message import Message, decode_value, encode_value
from orchestrator.protocol.requests.follow import JobState
from orchestrator.protocol.requests.request import Clock

HOURS = 3600.0
NOW = 1.7e9
M = TypeVar("M", bound=Message)


def received(message: M, ahead: float) -> M:
    """Return a message as the head reads it from a node whose clock is `ahead` of the head's."""
    return decode_value(type(message), encode_value(message), ahead=ahead)


@pytest.mark.parametrize("off", [0.0, -2 * HOURS, 3 * HOURS])
def test_received_converts_times_to_head_clock(off: float) -> None:
    theirs = NOW + off
    job = JobState(
        job="a", part=0, state="running", ranks={}, started=theirs - 60, log_time=theirs - 5
    )
    moved = received(job, off)
    assert (moved.started, moved.log_time, moved.ended) == (NOW - 60, NOW - 5, None)
    user = User(user="u", job="a", cores=1.0, memory=1, processes=1, name="p", pid=1,
                since=theirs - 60)  # fmt: skip
    holders = (Holder(1, "", "p", since=theirs - 60), Holder(2, "", "p"))
    checkup = Checkup(holders=holders, load=Load(cores=1.0, users=(user,)))
    seen = received(checkup, off)
    assert seen.load is not None and seen.holders is not None
    assert [each.since for each in (*seen.load.users, *seen.holders)] == [NOW - 60, NOW - 60, None]
    assert received(Checkup(), off) == Checkup()


def test_events_and_errors_are_converted() -> None:
    error = {"type": "E", "message": "m", "traceback": "t", "time": NOW + HOURS - 1}
    line = {"event": "rank_ended", "time": NOW + HOURS, "rank": 0, "local": 0, "pid": 1, "code": 1}
    event = events.event_from_data({**line, "error": error}, HOURS)
    assert isinstance(event, events.RankEnded) and event.error is not None
    assert (event.time, event.error.time) == (NOW, NOW - 1)


def test_clock_answer_is_not_converted() -> None:
    assert received(Clock(time=NOW), HOURS).time == NOW


def test_missing_time_stays_zero() -> None:
    assert (
        received(JobState(job="a", part=0, state="lost", ranks={}, started=0.0), HOURS).started == 0
    )
