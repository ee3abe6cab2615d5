"""Whether a job is started again, by how its attempts ended."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.launch import Launch
from orchestrator.head.follow.conclusion import after_attempt, step_reached
from orchestrator.head.follow.restarts import (
    Decision,
    decide_restart,
    restart_reason,
)
from orchestrator.records.experiment import Attempt, Experiment, JobRecord
from orchestrator.records.outcome import JobVerdict
from tests.records.one_node import NODE

KILLED = {"kind": "signal", "message": "killed by signal 9 (SIGKILL)", "where": ""}
FULL = {"kind": "disk_full", "message": "OSError: [Errno 28] No space left on device: 'a.pt'"}
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
            started=100.0 * number,
            ended=100.0 * number + 50,
            state="failed",
            exit_code=1,
            verdict=JobVerdict(**{"node": 1, "rank": 2, **verdict}),
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
        # A quick rejoin also counts as an attempt.
        ([(KILLED, 10), (KILLED, 20)], 1, False),
        ([(KILLED, 10), (KILLED, 20)], 2, True),
        ([({**KILLED, "kind": kind}, 10) for kind in ("hang", "link", "out_of_memory")], 9, True),
        ([(BUG, 10)], 3, True),
        ([(BUG, 10), (BUG, 10)], 3, False),
        ([(BUG, None), (BUG, None)], 3, False),
        ([(of_node(0), None), (of_node(1), None)], 3, False),
        ([(BUG, 10), (KILLED, 12), (BUG, 10)], 9, False),
        ([(BUG, 10), (OTHER_BUG, 10)], 3, True),
        # Bad data appears now and then.
        ([(BUG, 10), (BUG, 20)], 3, True),
        ([({**BUG, "kind": "environment"}, None)] * 2, 3, False),
        ([(KILLED, 0)] * 2, 9, True),
        ([(KILLED, 0)] * 3, 9, False),
        ([(KILLED, None)] * 3, 9, False),
        ([(KILLED, 5), (KILLED, 5), (KILLED, 5)], 9, True),
        ([(KILLED, 5), (KILLED, 5), (KILLED, 5), (KILLED, 5)], 9, False),
        ([(KILLED, 0), (KILLED, 0), (KILLED, 8), (KILLED, 8), (KILLED, 8)], 9, True),
    ],
)
def test_decide_restarts_by_cause_and_limit(
    ends: list[tuple[dict[str, Any], int | None]], allowed: int, restarts: bool
) -> None:
    assert decide_restart(attempts(*ends), allowed).restart == restarts


def full(node: str) -> tuple[dict[str, Any], None]:
    return {**FULL, "node_name": node}, None


@pytest.mark.parametrize(
    ("nodes", "spares", "restarts"),
    [
        ("a", False, True),
        ("aa", False, False),
        ("ab", False, True),
        ("aba", False, False),
        ("aa", True, True),
        # Three attempts in a row made no progress.
        ("aba", True, False),
    ],
)
def test_decide_restarts_after_full_disk_if_spare_exists(
    nodes: str, spares: bool, restarts: bool
) -> None:
    assert decide_restart(attempts(*map(full, nodes)), 9, spares=spares).restart == restarts


@pytest.mark.parametrize("state", ["done", "stopped"])
def test_decide_leaves_attempt_that_did_not_fail(state: str) -> None:
    (attempt,) = attempts((KILLED, 10))
    assert not decide_restart([Attempt(**{**vars(attempt), "state": state})], 3).restart


def test_decide_honours_exit_code_that_refuses_restart() -> None:
    decision = decide_restart(attempts((BUG, 10), codes=[93, 1]), 3)
    assert not decision.restart and "93" in decision.why


def test_decide_ends_crash_loop_with_first_cause() -> None:
    ends = [(KILLED, 7), (BUG, 7), (KILLED, 7), ({**KILLED, "kind": "hang"}, 7)]
    decision = decide_restart(attempts(*ends), 9)
    assert not decision.restart and decision.verdict is not None
    assert decision.verdict.kind == "exception"
    assert decision.why == (
        "3 attempts in a row got nowhere; the cause is that of attempt 2; attempt 3: a rank was"
        " killed: rank 2 on node 1; attempt 4: it hung: rank 2 on node 1"
    )
    same = decide_restart(attempts(*[(KILLED, 7)] * 4), 9)
    assert same.why.endswith("the cause is that of attempt 2")


@pytest.mark.parametrize(
    ("verdicts", "lasted", "ran", "restarts"),
    [
        # An earlier version recorded it this way.
        ([KILLED] * 4, [500, 700, 400, 600], None, True),
        ([KILLED] * 4, [500, 700, 400, 600], [480, 680, 370, 580], True),
        # They waited for a node, and came to nothing.
        ([KILLED] * 3, [500, 700, 400], [0, 0, 20], False),
        ([KILLED] * 3, [500, 700, 400], [0, 130, 20], True),
        # It is killed each hour, and resumes from its own saves.
        ([KILLED] * 4, [3700] * 4, [3600] * 4, True),
    ],
)
def test_decide_counts_long_attempts_as_progress_if_steps_are_unknown(
    verdicts: list[dict[str, Any]], lasted: list[float], ran: list[float] | None, restarts: bool
) -> None:
    ends = attempts(*((verdict, None) for verdict in verdicts))
    known = [
        replace(one, ended=one.started + lasted[at], ran=ran[at] if ran else None)
        for at, one in enumerate(ends)
    ]
    decision = decide_restart(known, 9)
    assert decision.restart == restarts
    if not restarts:
        assert "3 attempts in a row got nowhere" in decision.why


def test_decide_names_why_attempt_could_not_start() -> None:
    """The cause is that of the first attempt; what kept the job from going on is another."""
    unstarted = {"kind": "start", "message": "b does not have ckpt.pt (no room)\nmore"}
    decision = decide_restart(attempts((KILLED, None), (unstarted, None), (unstarted, None)), 9)
    assert not decision.restart and decision.verdict and decision.verdict.kind == "signal"
    assert "attempt 2: it could not be started: b does not have ckpt.pt (no room);" in decision.why


def test_because_names_cause_in_words() -> None:
    (one,) = attempts(({"kind": "lost", "rank": None}, None))
    assert restart_reason(one) == "node 1 lost"
    (two,) = attempts((KILLED, None))
    assert restart_reason(two) == "a rank was killed: rank 2 on node 1"
    assert decide_restart([two], 1) == Decision(True, restart_reason(two), None)


def test_decide_counts_printed_steps_as_progress() -> None:
    """It was killed each 40 seconds, on another node each time, and went on from what it saved."""
    ends = attempts(*[(KILLED, None)] * 4)
    further = [replace(one, printed=8 * at) for at, one in enumerate(ends, 1)]
    assert decide_restart(further, 9).restart
    stuck = [replace(one, printed=8) for one in ends]
    assert "3 attempts in a row got nowhere" in decide_restart(stuck, 9).why


# -- what is written down of an attempt -------------------------------------------------------

FAILED = JobRecord(
    job="j", experiment="", state="failed", command=[], nodes=[NODE], started=10.0,
    ended=20.0, exit_code=1, verdict=JobVerdict(kind="signal", node=0, rank=0),
    launch=Launch(max_restarts=1),
)  # fmt: skip


def experiment(tmp_path: Path) -> Experiment:
    for name in ("logs", "outputs"):
        (tmp_path / name).mkdir()
    return Experiment(tmp_path)


def test_after_attempt_continues_or_ends_job(tmp_path: Path) -> None:
    place = experiment(tmp_path)
    (tmp_path / "outputs/rank_00_metrics.jsonl").write_text('{"step": 3}\n{"step": 4}\n{"st')
    first = after_attempt(place, FAILED)
    assert first.state == "restarting" and not first.over and first.attempt == 1
    assert (first.ended, first.exit_code, first.verdict) == (None, None, None)
    assert first.attempts[0].step == 4 and first.attempts[0].restarted
    second = after_attempt(place, replace(FAILED, attempt=2, attempts=first.attempts, ended=30.0))
    assert second.over and second.attempt == 2 and second.verdict == FAILED.verdict
    assert [(one.number, one.started, one.ended) for one in second.attempts] == [
        (1, 10.0, 20.0),
        (2, 20.0, 30.0),
    ]
    assert after_attempt(place, replace(FAILED, launch=Launch())) == replace(
        FAILED, launch=Launch()
    )


def test_after_attempt_notes_running_time_of_ranks(tmp_path: Path) -> None:
    """An attempt that waits for a node, and is then not started, has not run at all."""
    place = experiment(tmp_path)
    times = [{"torchrun": 11.0, "ranks": 12.0}, {"torchrun": 11.0, "ranks": 14.0}, {}]
    nodes = [replace(NODE, index=at, times=each) for at, each in enumerate(times)]
    nodes[0] = replace(nodes[0], clock=3600.0)
    first = after_attempt(place, replace(FAILED, nodes=nodes)).attempts[0]
    assert (first.ran, first.clock) == (6.0, 3600.0)
    waiting = after_attempt(place, replace(FAILED, nodes=nodes[2:], ended=1000.0))
    assert (waiting.attempts[0].ran, waiting.attempts[0].alive) == (0.0, 0.0)


def test_step_reached_is_none_without_valid_steps(tmp_path: Path) -> None:
    assert step_reached(tmp_path) is None
    (tmp_path / "rank_00_metrics.jsonl").write_text('[]\nnonsense\n{"step": "x"}\n')
    assert step_reached(tmp_path) is None


def test_after_attempt_notes_printed_step(tmp_path: Path) -> None:
    place = experiment(tmp_path)
    (tmp_path / "printed").mkdir()
    (tmp_path / "printed/rank_00_metrics.jsonl").write_text('{"step": 14, "loss": 1.0}\n')
    last = after_attempt(place, FAILED).attempts[-1]
    assert (last.step, last.printed) == (None, 14)


def test_decide_does_not_blame_program_that_never_began() -> None:
    """The program has not run there, and the same disk may have space a moment later."""
    full = {"kind": "disk_full", "message": "b: No space left on device", "rank": None}
    one, two = attempts((full, None), (full, None), ran=0.0)
    assert restart_reason(two) == "it could not be started: b: No space left on device"
    assert decide_restart([one, two], 5).restart
    begun = [replace(each, log_before=[0, 0]) for each in (one, two)]
    assert not decide_restart(begun, 5).restart
