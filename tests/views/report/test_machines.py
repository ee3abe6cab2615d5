"""The machines' activity on the page, also for a program that writes no metrics."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.records.metrics import lines
from orchestrator.views.report import charts, run_data
from tests.records.test_checkpoint_store import change, save
from tests.views.report.reports import STARTED, experiment, line, sample_machines
from tests.views.report.test_page import drawn, parts_of


def test_job_without_metrics_has_machine_curves(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", steps=0)
    sample_machines(made)
    parts = parts_of(made)
    wanted = {"Machines", "GPUs: use", "Network: received"}
    shown = {words for words in {*wanted, "nothing to draw", "Swap"} if words in parts.words}
    assert shown == wanted
    known = drawn(parts)["charts"]
    assert all(chart["over"] == "time" for chart in known)
    use = known[0]["lines"]
    assert [(line["name"], line["means"][-1]) for line in use] == [("alpha", 0.9), ("beta", 0.7)]
    # These are seconds since the start.
    assert use[0]["steps"][:2] == [7, 12]


def test_many_nodes_are_drawn_as_range(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", steps=0)
    sample_machines(made, nodes=20)
    (line,) = charts.of_machines([run_data.read_run_data(made)])[0].lines
    assert line.name == "mean of 20 nodes"
    assert (line.curve.lows[-1], line.curve.highs[-1]) == (0.7, 0.9)


def test_long_stream_is_sampled(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", steps=0)
    path = made.path / "outputs/node_00_metrics.jsonl"
    with path.open("w") as file:
        for at in range(20_000):
            line = {"time": STARTED + 5 * at, "node": 0, "cpu": at / 20_000, "net": {}}
            file.write(json.dumps({**line, "disks": {"/": [1 << 40, 1 << 41]}}) + "\n")
    assert path.stat().st_size > lines.WHOLE_BYTES
    cpu = run_data.read_machines(made.path / "outputs", made.read_record())[0]["cpu"].means
    assert 80 < len(cpu) <= run_data.MACHINE_COLUMNS and cpu == sorted(cpu)


def test_step_events_are_placed_in_time(tmp_path: Path) -> None:
    known = {"cause": "slow compute", "rank": 2, "node": 1}
    slow = [
        {**known, "step": 20, "text": "rank 2 is slow"},
        {**known, "time": STARTED + 12.5, "text": "the head finds it slow"},
        {**known, "text": "at an unknown time"},
    ]
    made = experiment(tmp_path / "slow", steps=40)
    record = made.read_record()
    record.slow.extend(slow)
    made.write_record(record)
    told = run_data.read_run_data(made)
    found = [(moment.what, moment.time) for moment in told.moments]
    assert ("rank 2 is slow", STARTED + 20) in found
    assert ("the head finds it slow", STARTED + 12.5) in found
    assert "at an unknown time" not in dict(found)


@pytest.mark.parametrize("ahead", [-3600.0, 86400.0 * 30, 0.0])
def test_events_of_rank_0_are_corrected_for_clock(tmp_path: Path, ahead: float) -> None:
    made = experiment(tmp_path / "x", ranks=2, steps=0)
    record = made.read_record()
    first, second = record.nodes
    slow = [{"step": 9, "text": "rank 1 waits for its data"}]
    made.write_record(replace(record, nodes=[replace(first, clock=ahead), second], slow=slow))
    lines = [{**line(0, step, -1), "time": STARTED + ahead + step} for step in range(1, 31)]
    lines[20] |= {"skipped_steps": 1, "lost_steps": 2}
    text = "".join(json.dumps(each) + "\n" for each in lines)
    (made.path / "outputs/rank_00_metrics.jsonl").write_text(text)
    checkpoint = save(made.path / "outputs" / "checkpoints", 12)
    change(checkpoint, created=STARTED + ahead + 12)
    told = {moment.what: moment.time - STARTED for moment in run_data.read_run_data(made).moments}
    moments = {"1 step skipped for NaN or inf": 21, "2 steps whose loss is NaN or inf": 21}
    assert told.items() >= {**moments, "rank 1 waits for its data": 9}.items()
    assert [at for what, at in told.items() if "checkpoint of step 12" in what] == [12]


@pytest.mark.parametrize("ahead", [-3600.0, 86400.0 * 30, 0.0])
def test_wrong_node_clock_is_corrected(tmp_path: Path, ahead: float) -> None:
    made = experiment(tmp_path / "x", steps=0)
    record = made.read_record()
    first, second = record.nodes
    made.write_record(replace(record, nodes=[first, replace(second, clock=ahead)]))
    for name, host, wrong in (
        ("node_00_metrics", "alpha", 0.0),
        ("node_01_metrics", "gamma", ahead),
        ("node_01_metrics_2", "beta", ahead),
    ):
        at = STARTED + wrong + (20 if "_2" in name else 0)
        lines = [
            {"time": at, "about": {"host": host}},
            {"time": at + 2, "cpu": 0.5, "net": {}},
            {"time": at + 7, "cpu": 0.5, "net": {}},
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (made.path / f"outputs/{name}.jsonl").write_text(text)
    known = run_data.read_machines(made.path / "outputs", made.read_record())
    assert [known[node]["cpu"].steps for node in (0, 1)] == [[2, 7], [2, 7, 22, 27]]
    assert {*known[0]["cpu"].means, *known[1]["cpu"].means} == {0.5}
