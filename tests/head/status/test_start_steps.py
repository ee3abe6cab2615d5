"""The seconds of a start: each is of one step, and none of two."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from orchestrator.config.launch import Launch
from orchestrator.head.status import start_steps
from orchestrator.head.status.status import from_record, to_json, to_text
from orchestrator.records.experiment import Attempt, JobRecord
from orchestrator.records.manifest import StartTimes
from tests.records.one_node import NODE

TIMES = StartTimes(
    begin=100.0, reached=102.0, synced=102.125, planned=102.25, checked=102.5,
    nodes=[{"begin": 100.5}, {"begin": 100.25}],
)  # fmt: skip
FIRST, SECOND = {"ranks": 105.5, "output": 106.5}, {"ranks": 105.0, "output": 106.0}
STEPS = {"command": 0.25, "connect": 1.75, "code": 0.125, "plan": 0.125, "check": 0.25,
         "ranks": 3.0, "output": 0.5}  # fmt: skip


def record(*times: dict[str, float], launch: Launch = Launch()) -> JobRecord:  # noqa: B008
    nodes = [dataclasses.replace(NODE, index=i, times=each) for i, each in enumerate(times)]
    return JobRecord("job", "e", "done", [], nodes, 100.0, ended=110.0, launch=launch)


def test_every_second_is_of_one_step() -> None:
    """The slowest node counts, and the first line that any rank prints."""
    found = start_steps.steps(TIMES, record(FIRST, SECOND))
    assert found == STEPS
    assert sum(found.values()) == 106.0 - TIMES.begin


def test_a_step_that_is_not_known_is_part_of_the_next() -> None:
    times = dataclasses.replace(TIMES, planned=0.0)
    found = start_steps.steps(times, record(FIRST, {"ranks": 105.0}))
    assert "plan" not in found
    assert (found["check"], found["ranks"], found["output"]) == (0.375, 3.0, 1.0)


def test_ranks_of_which_some_have_not_started_have_no_time() -> None:
    assert [*start_steps.steps(TIMES, record(FIRST, {}))][-1] == "check"


def test_a_rank_that_prints_before_another_one_starts() -> None:
    found = start_steps.steps(TIMES, record(FIRST, {**SECOND, "output": 105.25}))
    assert found["output"] == 0


def test_a_launch_that_waited_for_its_turn_is_counted_from_there() -> None:
    found = start_steps.steps(TIMES, record(FIRST, SECOND, launch=Launch(queue=True)))
    assert found == {name: STEPS[name] for name in ("plan", "check", "ranks", "output")}


@pytest.mark.parametrize("times", [StartTimes(), dataclasses.replace(TIMES, nodes=[])])
def test_a_start_without_times_has_no_steps(times: StartTimes) -> None:
    assert start_steps.steps(times, record({}, {})) == {}


def test_status_has_one_line_of_it(tmp_path: Path) -> None:
    """Of the first attempt alone: the manifest knows no other one."""
    timeline = {**dataclasses.asdict(TIMES), "started": 103.0}
    (tmp_path / "manifest.json").write_text(json.dumps({"timeline": timeline}))
    known = dataclasses.replace(record(FIRST, SECOND), experiment=str(tmp_path))
    line = "  start: command 0.25 s, connect 1.75 s, code 0.12 s, plan 0.12 s, check 0.25 s,"
    line += " ranks 3.00 s, output 0.50 s"
    assert line in to_text(known, from_record(known)).splitlines()
    assert json.loads(to_json(known, from_record(known)))["start"] == STEPS
    ended = Attempt(1, "job", 100.0, 105.0, "failed", 1, None, ["a", "b"], restarted=True)
    later = dataclasses.replace(known, state="running", ended=None, attempts=[ended])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    broken = dataclasses.replace(known, experiment=str(tmp_path / "broken"))
    elsewhere = dataclasses.replace(known, experiment="")
    for other in (later, broken, elsewhere):
        assert "start:" not in to_text(other, from_record(other))
        assert json.loads(to_json(other, from_record(other)))["start"] == {}
