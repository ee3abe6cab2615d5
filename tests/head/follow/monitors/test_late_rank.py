"""Who holds the others up, from when each rank entered the same collectives."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest

from orchestrator.head.follow.monitors.slow_sources import Late, asleep, late_rank, waits
from orchestrator.protocol.requests.follow import Pace

BUCKETS = 4  # collectives in a step
STEPS = 30


def trained(
    compute: Sequence[float], *, jitter: float = 0.0, extra: float = 0.0, clock: float = 0.0
) -> dict[int, Pace]:
    """A training in which each rank computes so long per step, and waits for all at its end.

    The last rank loses `extra` seconds at the begin of a step; its clock is ahead by `clock`.
    """
    draw = random.Random(0)
    times: list[dict[int, float]] = [{} for _ in compute]
    begin = 1000.0
    for step in range(STEPS):
        ends = []
        for rank, seconds in enumerate(compute):
            late = extra * (rank == len(compute) - 1)
            ahead = clock * (rank == len(compute) - 1)
            mine = seconds * draw.uniform(1 - jitter, 1 + jitter)
            for bucket in range(BUCKETS):
                when = begin + late + mine * (bucket + 1) / BUCKETS
                times[rank][step * BUCKETS + bucket] = when + ahead
            ends.append(begin + late + mine)
        begin = max(ends) + 0.01
    return {rank: Pace(length=BUCKETS, times=each) for rank, each in enumerate(times)}


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("clock", [0.0, 7.0])
def test_slow_compute_and_slow_data(ranks: int, clock: float) -> None:
    ahead = {ranks - 1: clock}
    slow = trained([0.3] * (ranks - 1) + [0.42], jitter=0.05, clock=clock)
    found = late_rank(slow, ahead, 0.001)
    assert found is not None and found.rank == ranks - 1
    assert found.part == pytest.approx(0.12 / 0.43, abs=0.08)
    stalls = late_rank(trained([0.3] * ranks, jitter=0.05, extra=0.2, clock=clock), ahead)
    assert stalls is not None and stalls.rank == ranks - 1
    assert stalls.part == pytest.approx(0.2 / 0.51, abs=0.08)


@pytest.mark.parametrize(
    ("paces", "error"),
    [
        (trained([0.3, 0.3, 0.3, 0.3], jitter=0.4), 0.0),  # now this one, now that one
        (trained([0.3, 0.3, 0.3, 0.31], jitter=0.02), 0.0),  # it is late, and costs nothing
        (trained([0.3, 0.3, 0.38]), 0.1),  # the clocks may be wrong by more
        (trained([0.002, 0.002, 0.006]), 0.0),  # a step so short is measured by nothing
        (trained([0.3]), 0.0),
        ({}, 0.0),
        ({0: Pace(length=0, times={}), 1: Pace(length=0, times={})}, 0.0),
        ({0: Pace(length=4, times={1: 1.0}), 1: Pace(length=4, times={2: 1.0})}, 0.0),
        ({0: trained([0.3])[0], 1: Pace(length=2, times=trained([0.5])[0].times)}, 0.0),
    ],
)
def test_nobody_is_named(paces: dict[int, Pace], error: float) -> None:
    assert late_rank(paces, {}, error) is None


@pytest.mark.parametrize(("ranks", "seconds"), [(2, 0.3), (2, 1.5), (4, 0.3), (8, 0.5)])
def test_an_hour_on_busy_machines_names_nobody(ranks: int, seconds: float) -> None:
    """Steps vary by a third, other programs double them for up to four seconds, data hiccups."""
    draw = random.Random(ranks)
    remembered: deque[list[list[float]]] = deque(maxlen=500)  # steps, of each rank's collectives
    busy, next_busy = [0.0] * ranks, [draw.expovariate(1 / 60) for _ in range(ranks)]
    now, look, looks, step = 0.0, 30.0, 0, 0
    while now < 3600:
        entered = []
        for rank in range(ranks):
            if now > next_busy[rank]:
                busy[rank] = now + draw.uniform(0, 4)
                next_busy[rank] = now + draw.expovariate(1 / 60)
            compute = seconds * draw.uniform(0.83, 1.17) * (2 if now < busy[rank] else 1)
            begin = now + (draw.uniform(0, 2) if draw.random() < seconds / 60 else 0)
            entered.append([begin + compute * part / BUCKETS for part in range(1, BUCKETS + 1)])
        remembered.append(entered)
        now, step = max(times[-1] for times in entered) + 0.005, step + 1
        if now >= look:
            look, looks = now + 60, looks + 1
            first = step - len(remembered)
            paces = {
                rank: Pace(
                    length=BUCKETS,
                    times={
                        (first + index) * BUCKETS + bucket: when
                        for index, each in enumerate(remembered)
                        if (first + index) % 4 == 0
                        for bucket, when in enumerate(each[rank])
                    },
                )
                for rank in range(ranks)
            }
            assert late_rank(paces, {}, 0.001) is None
    assert looks > 50


def test_collectives_that_not_all_have_entered_do_not_count() -> None:
    paces = trained([0.3, 0.5])
    times = {number: when for number, when in paces[0].times.items() if number < 60}
    found = late_rank({0: Pace(length=BUCKETS, times=times), 1: paces[1]}, {})
    assert found is not None and found.rank == 1


def slept(part: float | None) -> tuple[Pace, Pace]:
    """Return what a rank says before and after ten seconds, of which it slept a part."""
    awake = None if part is None else 5 + 10 * (1 - part)
    return Pace(length=1, times={}, awake=5, at=10), Pace(length=1, times={}, awake=awake, at=20)


def test_how_long_a_program_slept() -> None:
    assert asleep(*slept(0.7)) == pytest.approx(0.7)
    assert asleep(*slept(-0.1)) == 0.0  # clocks differ by a little
    assert asleep(None, slept(0.7)[1]) is None
    assert asleep(*slept(None)) is None
    assert asleep(*reversed(slept(0.7))) is None


@pytest.mark.parametrize(
    ("own", "others", "verdict"),
    [
        (0.4, [0.4, 0.4], True),
        (0.0, [0.4, 0.4], False),
        (0.3, [0.7, 0.7], False),  # each rank sleeps in a part of every step
        (0.7, [0.7, 0.7], True),
        (0.0, [0.0, 0.0], False),  # the others ask again and again in place of sleeping
        (0.4, [0.0, 0.0], True),
        (0.3, [0.7, None], False),
        (None, [0.4, 0.4], None),
        (0.4, [None, None], None),
    ],
)
def test_whether_it_waits_or_computes(
    own: float | None, others: list[float | None], verdict: bool | None
) -> None:
    paces = {rank: slept(part) for rank, part in enumerate([*others, own])}
    before, now = ({rank: pace[at] for rank, pace in paces.items()} for at in (0, 1))
    assert waits(Late(2, 0.4), before, now) is verdict
