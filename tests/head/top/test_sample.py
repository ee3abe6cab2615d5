"""What a look is made of: rates between two, how far jobs are, who is slow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.head.connect.transport import Transport
from orchestrator.head.top import sample
from orchestrator.head.top.sample import NodeSample, Watch
from orchestrator.protocol.facts import Checkup
from tests.head.report.stories import experiment
from tests.head.top.samples import load


class NoTransport(Transport):
    def __init__(self) -> None: ...


def test_rates_are_between_two_looks() -> None:
    before = load()
    now = before.replace(received=3000, sent=1000, at=12.0)  # sent: the counter began anew
    assert sample.rates_between(before, now) == (1000.0, 0.0)
    assert sample.rates_between(None, now) == sample.rates_between(now, now) == (None, None)


def test_the_slowest_rank_is_the_one_that_computes_longer() -> None:
    lines = [{"step_ms": 100, "data_ms": 1, "forward_backward_ms": 50} for _ in range(4)]
    assert sample.slowest(lines) == ""
    lines[2]["data_ms"] = 41
    assert sample.slowest(lines) == "rank 2 +40%"
    assert sample.slowest([{}, {}]) == sample.slowest([]) == ""
    assert sample.slowest([{"step_ms": "x"}, {"data_ms": None}]) == ""


def test_jobs_are_found_with_their_experiments(tmp_path: Path) -> None:
    made = experiment(tmp_path / "train_20260101_000000", steps=30, state="running", ended=None)
    made.write("config.yaml", "training:\n  max_steps: 50\n")
    watch = Watch(Transport.__new__(NoTransport), [], tmp_path)
    nodes = [
        NodeSample("one", Checkup(load=load("train_20260101_000000"))),
        NodeSample("two", Checkup(load=load("foreign"))),
        NodeSample("three", Checkup(load=load("train_20260101_000000"))),
        NodeSample("gone", problem="it does not answer"),
    ]
    ours, foreign = watch.jobs(nodes)
    assert (ours.nodes, ours.step, ours.steps) == (("one", "three"), 30, 50)
    assert ours.left == pytest.approx(2.0) and ours.slowest == "rank 2 +29%"
    assert (foreign.job, foreign.experiment, foreign.step) == ("foreign", "", None)
    (made.path / "config.yaml").unlink()
    watch.known.clear()
    assert watch.jobs(nodes)[0].left is None
    assert watch.jobs([]) == [] and not watch.known
    line = json.dumps({"step": 5})
    (made.path / "outputs/rank_00_metrics.jsonl").write_text(line)
    assert watch.jobs(nodes)[0].step == 5
