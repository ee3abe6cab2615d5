"""What is written down of an attempt, and the line between two of them in a log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from orchestrator.config.launch import Launch
from orchestrator.head.follow.node_logs import NodeLogs
from orchestrator.head.screen.log_reader import LogFile, LogReader
from orchestrator.head.start import separator
from orchestrator.head.start.judge import MORE_NODES, judged, step_reached
from orchestrator.records.experiment import RESIZED, Experiment, JobRecord
from tests.records.one_node import NODE

FAILED = JobRecord(
    job="j", experiment="", state="failed", command=[], nodes=[NODE], started=10.0, head={},
    ended=20.0, exit_code=1, verdict={"kind": "signal", "node": 0, "rank": 0},
    launch=Launch(max_restarts=1),
)  # fmt: skip


def experiment(tmp_path: Path) -> Experiment:
    for name in ("logs", "outputs"):
        (tmp_path / name).mkdir()
    return Experiment(tmp_path)


def test_a_job_goes_on_or_is_over(tmp_path: Path) -> None:
    place = experiment(tmp_path)
    (tmp_path / "outputs/rank_00_metrics.jsonl").write_text('{"step": 3}\n{"step": 4}\n{"st')
    first = judged(place, FAILED)
    assert first.state == "restarting" and not first.over and first.attempt == 2
    assert (first.ended, first.exit_code, first.verdict) == (None, None, None)
    assert first.attempts[0].step == 4 and first.attempts[0].restarted
    second = judged(place, replace(FAILED, attempts=first.attempts, ended=30.0))
    assert second.over and second.attempt == 2 and second.verdict == FAILED.verdict
    assert [(one.number, one.started, one.ended) for one in second.attempts] == [
        (1, 10.0, 20.0),
        (2, 20.0, 30.0),
    ]
    assert judged(place, replace(FAILED, launch=Launch())) == replace(FAILED, launch=Launch())


def test_how_long_the_ranks_of_an_attempt_ran(tmp_path: Path) -> None:
    """An attempt that waits for a node, and is then not started, has not run at all."""
    place = experiment(tmp_path)
    times = [{"torchrun": 11.0, "ranks": 12.0}, {"torchrun": 11.0, "ranks": 14.0}, {}]
    nodes = [replace(NODE, index=at, times=each) for at, each in enumerate(times)]
    nodes[0] = replace(nodes[0], clock=3600.0)
    first = judged(place, replace(FAILED, nodes=nodes)).attempts[0]
    assert (first.ran, first.clock) == (6.0, 3600.0)
    waiting = judged(place, replace(FAILED, nodes=nodes[2:], ended=1000.0))
    assert (waiting.attempts[0].ran, waiting.attempts[0].alive) == (0.0, 0.0)


def test_a_planned_end_costs_no_restart(tmp_path: Path) -> None:
    """The job goes on whatever is left of its restarts, unless its user wants it to stop."""
    place = experiment(tmp_path)
    failed = judged(place, FAILED)
    planned = replace(FAILED, state=RESIZED, verdict=None, attempts=failed.attempts, ended=30.0)
    larger = judged(place, planned, resized="b can join")
    assert larger.state == "restarting" and larger.attempts[-1].why == "b can join"
    assert judged(place, planned).attempts[-1].why == MORE_NODES
    again = judged(place, replace(FAILED, attempts=larger.attempts, ended=40.0))
    assert again.state == "failed" and again.attempts[-1].why == "its restart is used"
    stopped = judged(place, planned, stopped=True, resized="b can join")
    assert stopped.over and stopped.attempts[-1].why == "the user stopped it"


def test_steps_that_are_not_known(tmp_path: Path) -> None:
    assert step_reached(tmp_path) is None
    (tmp_path / "rank_00_metrics.jsonl").write_text('[]\nnonsense\n{"step": "x"}\n')
    assert step_reached(tmp_path) is None


def test_a_line_between_attempts_and_bytes_as_they_were(tmp_path: Path) -> None:
    place = experiment(tmp_path)
    logs = NodeLogs.of(place, NODE)
    logs.text.append(memoryview(b"one\nhalf"))
    logs.ranks.append(memoryview(b"0 0\n"))
    node = separator.begin(place, NODE, "attempt 2")
    logs = NodeLogs.of(place, node)
    assert logs.text.size == logs.ranks.size == 0, "offsets begin anew"
    logs.text.append(memoryview(b"two\n"))
    logs.ranks.append(memoryview(f"{node.log_before} 1\n".encode()))
    assert logs.text.size == 4
    log = LogFile(0, "a", place.log(NODE), place.ranks(NODE))
    assert log.text.read_bytes() == b"one\nhalf\norchestrator: attempt 2\ntwo\n"
    pieces = [(piece.stream, piece.data) for piece in LogReader(log).read()]
    assert pieces == [
        ("0", b"one\nhalf"),
        ("-", b"\norchestrator: attempt 2\n"),
        ("1", b"two\n"),
    ]
    assert LogReader(log, start=node.log_before).read() == [("1", b"two\n")]
