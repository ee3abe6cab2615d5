"""What a start's times are subtracted to: every second belongs to one step, and none to two."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.head.commands.kept.start_report import report_of, to_text
from orchestrator.head.screen.output import PLAIN
from orchestrator.head.start.request import begun
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord
from orchestrator.records.manifest import StartTimes

REACHED = {"begin": 100.5, "connect": 100.6, "server": 101.0, "probe": 101.25}
TIMES = StartTimes(
    begin=100.0, reached=102.0, synced=102.125, planned=102.25, checked=102.5, recorded=103.0,
    started=103.75,
    nodes=[REACHED, {**REACHED, "begin": 100.25, "probe": 102.0}],
)  # fmt: skip
FORKED = {"supervisor": 103.5, "torch": 105.0, "ranks": 105.5, "output": 106.0}


def record(*times: dict[str, float]) -> JobRecord:
    nodes = [
        NodeRecord(
            index=index, name=f"n{index}", host="h", user=None, port=None, address="", python="",
            first_rank=index, nproc=1, times=each,
        )
        for index, each in enumerate(times)
    ]  # fmt: skip
    return JobRecord("job", "e", "done", [], nodes, 100.0)


def test_every_second_is_of_one_step() -> None:
    report = report_of(TIMES, record(FORKED, FORKED))
    assert report.head == {
        **{"command": 0.25, "sync": 0.125, "plan": 0.125, "check": 0.25, "record": 0.5}
    }
    name, steps = report.nodes[0]
    assert name == "n0"
    assert steps["others"] == 0.75
    assert report.nodes[1][1]["others"] == 0
    assert (steps["supervisor"], steps["torch"], steps["rendezvous"]) == (0.5, 1.5, 0.5)
    assert steps["total"] == 6
    own = sum(value or 0 for step, value in steps.items() if step != "total")
    waited = REACHED["begin"] - TIMES.begin  # in which the head got ready
    assert own + waited + 0.25 + 0.25 + 0.5 == pytest.approx(steps["total"])
    assert report.slowest == ("n0", "torch", 1.5)


def test_a_step_that_is_not_known_is_part_of_the_next() -> None:
    plain = {name: FORKED[name] for name in ("supervisor", "ranks")}
    ((_, steps), _) = report_of(TIMES, record(plain, plain)).nodes
    assert (steps["torch"], steps["rendezvous"], steps["output"]) == (None, 2.0, None)
    assert steps["total"] == 5.5
    text = to_text(Experiment(Path("e")), report_of(TIMES, record(plain, FORKED)), PLAIN)
    assert "RENDEZVOUS" in text and "TORCH is -" in text


def test_a_start_that_nobody_timed_is_an_error() -> None:
    with pytest.raises(UsageError, match="nothing is known of the start"):
        report_of(StartTimes(), record({}, {}))


def test_the_command_began_before_now_and_not_long_ago() -> None:
    assert 0 < begun() <= time.time()
