"""Whether a job is started again, by how its attempts ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.head.start.policy import Decision, because, decide
from orchestrator.records.experiment import Attempt

KILLED = {"kind": "signal", "message": "killed by signal 9 (SIGKILL)", "where": ""}
BUG = {"kind": "exception", "message": "ValueError: 3", "where": "train.py:7 in step"}
OTHER_BUG = {**BUG, "where": "train.py:9 in step"}


def of_node(number: int) -> dict[str, str]:
    """The same, told by a node that has its own snapshot of the code."""
    path = f"/root/.orchestrator/code/snapshots/0a1b2c3d-{number}/x/train.py"
    return {**BUG, "where": f"{path}:7 in step", "message": f"ValueError: {path} is odd"}


def attempts(*ends: tuple[dict[str, Any], int | None], **more: Any) -> list[Attempt]:
    """Attempts that ended so, each with the step that it had reached; None: not known."""
    return [
        Attempt(
            number=number,
            job="j",
            started=100.0 * number,
            ended=100.0 * number + 50,
            state="failed",
            exit_code=1,
            verdict={"node": 1, "rank": 2, **verdict},
            nodes=["a", "b"],
            step=step,
            **more,
        )
        for number, (verdict, step) in enumerate(ends, 1)
    ]


@pytest.mark.parametrize(
    ("ends", "allowed", "restarts"),
    [
        ([(KILLED, 10)], 1, True),
        ([(KILLED, 10)], 0, False),
        ([(KILLED, 10), (KILLED, 20)], 1, False),  # a quick rejoin is an attempt, too
        ([(KILLED, 10), (KILLED, 20)], 2, True),
        ([({**KILLED, "kind": kind}, 10) for kind in ("hang", "link", "out_of_memory")], 9, True),
        ([(BUG, 10)], 3, True),
        ([(BUG, 10), (BUG, 10)], 3, False),
        ([(BUG, None), (BUG, None)], 3, False),
        ([(of_node(0), None), (of_node(1), None)], 3, False),
        ([(BUG, 10), (KILLED, 12), (BUG, 10)], 9, False),
        ([(BUG, 10), (OTHER_BUG, 10)], 3, True),
        ([(BUG, 10), (BUG, 20)], 3, True),  # bad data now and then
        ([({**BUG, "kind": "environment"}, None)] * 2, 3, False),
        ([(KILLED, 0)] * 2, 9, True),
        ([(KILLED, 0)] * 3, 9, False),
        ([(KILLED, None)] * 3, 9, False),
        ([(KILLED, 5), (KILLED, 5), (KILLED, 5)], 9, True),
        ([(KILLED, 5), (KILLED, 5), (KILLED, 5), (KILLED, 5)], 9, False),
        ([(KILLED, 0), (KILLED, 0), (KILLED, 8), (KILLED, 8), (KILLED, 8)], 9, True),
    ],
)
def test_what_is_started_again(
    ends: list[tuple[dict[str, Any], int | None]], allowed: int, restarts: bool
) -> None:
    assert decide(attempts(*ends), allowed).restart == restarts


@pytest.mark.parametrize("state", ["done", "stopped"])
def test_what_has_not_failed_is_left(state: str) -> None:
    (attempt,) = attempts((KILLED, 10))
    assert not decide([Attempt(**{**vars(attempt), "state": state})], 3).restart


def test_a_program_may_refuse() -> None:
    decision = decide(attempts((BUG, 10), codes=[93, 1]), 3)
    assert not decision.restart and "93" in decision.why


def test_a_crash_loop_ends_with_its_first_cause() -> None:
    ends = [(KILLED, 7), (BUG, 7), (KILLED, 7), ({**KILLED, "kind": "hang"}, 7)]
    decision = decide(attempts(*ends), 9)
    assert not decision.restart and decision.verdict is not None
    assert decision.verdict["kind"] == "exception"
    assert decision.why == (
        "3 attempts in a row got nowhere; the cause is that of attempt 2; attempt 3: a rank was"
        " killed: rank 2 on node 1; attempt 4: it hung: rank 2 on node 1"
    )
    same = decide(attempts(*[(KILLED, 7)] * 4), 9)
    assert same.why.endswith("the cause is that of attempt 2")


LOST = {**KILLED, "kind": "link"}


@pytest.mark.parametrize(
    ("verdicts", "lasted", "ran", "restarts"),
    [
        ([KILLED] * 4, [500, 700, 400, 600], None, True),  # as an earlier version noted it
        ([KILLED] * 4, [500, 700, 400, 600], [480, 680, 370, 580], True),
        # They waited for a node, and came to nothing.
        ([KILLED] * 3, [500, 700, 400], [0, 0, 20], False),
        ([KILLED] * 3, [500, 700, 400], [0, 130, 20], True),
        # It loads for minutes, and then always fails.
        ([KILLED] * 2, [300, 310], [200, 205], True),
        ([KILLED] * 3, [300, 310, 290], [200, 205, 190], False),
        ([KILLED, LOST, KILLED], [300, 310, 290], [200, 205, 190], True),
        ([LOST, KILLED, KILLED, KILLED], [300] * 4, [200, 205, 190, 200], False),
        # Somebody kills it each hour, and it goes on from what it keeps itself.
        ([KILLED] * 4, [3700] * 4, [3600] * 4, True),
    ],
)
def test_attempts_of_unknown_steps_get_somewhere_by_running_long(
    verdicts: list[dict[str, Any]], lasted: list[float], ran: list[float] | None, restarts: bool
) -> None:
    ends = attempts(*((verdict, None) for verdict in verdicts))
    known = [
        replace(one, ended=one.started + lasted[at], ran=ran[at] if ran else None)
        for at, one in enumerate(ends)
    ]
    decision = decide(known, 9)
    assert decision.restart == restarts
    if not restarts:
        assert "3 attempts in a row got nowhere" in decision.why


def test_why_an_attempt_could_not_be_started_is_told_at_the_end() -> None:
    """The cause is that of the first attempt; what kept the job from going on is another."""
    unstarted = {"kind": "start", "message": "b does not have ckpt.pt (no room)\nmore"}
    decision = decide(attempts((KILLED, None), (unstarted, None), (unstarted, None)), 9)
    assert not decision.restart and decision.verdict and decision.verdict["kind"] == "signal"
    assert "attempt 2: it could not be started: b does not have ckpt.pt (no room);" in decision.why


def test_words() -> None:
    (one,) = attempts(({"kind": "lost", "rank": None}, None))
    assert because(one) == "node 1 lost"
    (two,) = attempts((KILLED, None))
    assert because(two) == "a rank was killed: rank 2 on node 1"
    assert decide([two], 1) == Decision(True, because(two), None)
