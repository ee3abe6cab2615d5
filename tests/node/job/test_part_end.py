"""The phases of an end: events and times in, what is due out."""

import pytest

from orchestrator.node.job.part.part_end import (
    HURRY_SECONDS,
    SWEEP_SECONDS,
    Due,
    EndCause,
    PartEnd,
    Phase,
)
from orchestrator.protocol.events import EndOrder
from orchestrator.protocol.timing import DEATH_SECONDS

GRACE = 30.0
ASKED = EndOrder(why="asked", grace=GRACE)
FAILED = EndOrder(why="failed", grace=GRACE, failed=True)
LOST = EndOrder(why="lost", grace=GRACE, lost=1)
NOW = 100.0


@pytest.mark.parametrize(
    ("order", "cause", "dues"),
    [
        (ASKED, EndCause.ORDER, {1.5: Due.NOTHING, 29.9: Due.NOTHING, 30.0: Due.KILL}),
        (FAILED, EndCause.RANK, {0.9: Due.NOTHING, 1.0: Due.SPARE, 30.0: Due.KILL}),
        (LOST, EndCause.ORDER, {0.9: Due.NOTHING, 1.0: Due.SPARE, 30.0: Due.KILL}),
        (FAILED.replace(grace=0.4), EndCause.RANK, {0.3: Due.NOTHING, 0.4: Due.KILL}),
        (ASKED.replace(grace=0.0), EndCause.ORDER, {0.0: Due.KILL}),
    ],
)
def test_order_starts_end_of_running_ranks(
    order: EndOrder, cause: EndCause, dues: dict[float, Due]
) -> None:
    end = PartEnd(GRACE)
    assert end.order(order, cause, NOW, 1000.0)
    assert (end.phase, end.cause, end.why, end.since) == (Phase.ENDING, cause, order.why, 1000.0)
    assert {after: end.due(NOW + after) for after in dues} == dues


def test_later_order_only_shortens_grace() -> None:
    end = PartEnd(GRACE)
    end.order(ASKED, EndCause.ORDER, NOW, 1000.0)
    assert not end.order(FAILED, EndCause.RANK, NOW + 5, 1005.0)
    assert (end.cause, end.why, end.since) == (EndCause.ORDER, "asked", 1000.0)
    assert (end.kill_at, end.spare_at) == (NOW + GRACE, NOW + 5 + HURRY_SECONDS)
    end.order(ASKED.replace(grace=0.0), EndCause.ORDER, NOW + 6, 1006.0)
    assert end.due(NOW + 6) is Due.KILL


@pytest.mark.parametrize(
    ("code", "before", "failed", "cause"),
    [
        (0, False, False, EndCause.NOTHING),
        (1, False, True, EndCause.AGENT),
        (-9, True, False, EndCause.ORDER),
    ],
)
def test_unasked_end_of_agent_is_failure(
    code: int, before: bool, failed: bool, cause: EndCause
) -> None:
    end = PartEnd(GRACE)
    if before:
        end.order(ASKED, EndCause.ORDER, NOW, 1000.0)
    assert end.agent_ended(code) is failed
    assert end.cause is cause


def test_sweep_spares_saving_ranks_until_grace_ends() -> None:
    end = PartEnd(GRACE)
    end.agent_ended(-9)
    end.sweep(NOW)
    assert not end.order(FAILED, EndCause.ORDER, NOW, 1000.0), "they are asked already"
    now = NOW + SWEEP_SECONDS
    while now < NOW + GRACE:
        assert end.due(now) is Due.SPARE
        end.spared(now)
        assert end.due(now) is Due.NOTHING
        now += SWEEP_SECONDS
    assert end.due(now) is Due.KILL


@pytest.mark.parametrize("grace", [0.0, GRACE])
def test_leftovers_of_successful_job_get_a_moment(grace: float) -> None:
    end = PartEnd(grace)
    end.agent_ended(0)
    end.sweep(NOW)
    assert end.due(NOW + SWEEP_SECONDS - 0.1) is Due.NOTHING
    assert end.due(NOW + SWEEP_SECONDS) is not Due.NOTHING


def test_sweep_ends_once_nothing_lives_or_kill_fails() -> None:
    end = PartEnd(GRACE)
    end.sweep(NOW)
    end.left(alive=False, now=NOW)
    assert end.phase is Phase.OVER
    end = PartEnd(GRACE)
    end.sweep(NOW)
    end.left(alive=True, now=NOW + 2 * DEATH_SECONDS)
    assert end.phase is Phase.SWEEPING, "nothing was killed yet"
    end.killed(NOW)
    end.left(alive=True, now=NOW + 1)
    assert (end.phase, end.due(NOW + 1)) == (Phase.SWEEPING, Due.KILL), "born during the kill"
    end.left(alive=True, now=NOW + DEATH_SECONDS + 0.1)
    assert end.phase is Phase.OVER
