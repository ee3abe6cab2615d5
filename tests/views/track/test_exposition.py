"""Prometheus reads the experiments' values in its own format."""

import asyncio
import os
import re
from pathlib import Path

import pytest

from orchestrator.config.launch import Where
from orchestrator.records.experiment import NodeRecord
from orchestrator.views.track.exposition import (
    HELP,
    OLD_SECONDS,
    STAYS_SECONDS,
    Exposition,
    format_metrics,
    metrics_app,
)
from tests.views.dashboard.client import ask
from tests.views.track.jobs import NOW, job, tell

GRAFANA = Path(__file__).parents[3] / "config" / "grafana" / "orchestrator.json"


def points(root: Path, now: float = NOW) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for name, labels, value in Exposition(Where(experiments=root)).points(now):
        found.setdefault(name, []).append((labels, value))
    return found


def test_points_have_ranks_and_nodes(tmp_path: Path) -> None:
    made = job(tmp_path, "one", goodput={"training": 30.0, "start": 10.0})
    tell(
        made,
        "rank_00_metrics.jsonl",
        {"time": NOW, "rank": 0, "step": 7, "loss": 0.5, "step_ms": 250.0, "data_ms": 50.0},
        {"time": NOW, "rank": 0, "step": 8, "loss": 0.25, "step_ms": 500, "acc": 0.9, "x": None},
    )
    tell(
        made,
        "node_00_metrics.jsonl",
        {"time": NOW, "node": 0, "about": {"host": "a"}},
        {"time": NOW, "node": 0, "cpu": 0.5, "net": {"eth0": [1.0, 2.0]}, "gpu": {"use": [0.9]}},
    )
    found = points(tmp_path)
    own = {"experiment": made.name}
    rank = {**own, "node": "a", "rank": "0"}
    assert found["job_state"] == [({**own, "state": "running"}, 1)]
    assert found["job_goodput_ratio"] == [(own, 0.75)]
    assert found["step"] == [(rank, 8)]
    assert found["step_seconds"] == [(rank, 0.5)]
    assert found["metric"] == [({**rank, "name": "acc"}, 0.9)]
    # The parts are read from the last line only.
    assert "step_part_seconds" not in found
    node = {**own, "node": "a"}
    assert found["node_cpu_ratio"] == [(node, 0.5)]
    tell(made, "rank_00_metrics_2.jsonl", {"time": NOW, "rank": 0, "step": 3})
    assert points(tmp_path)["step"] == [(rank, 3)]
    assert found["node_network_sent_bytes_per_second"] == [({**node, "interface": "eth0"}, 2.0)]
    assert found["node_gpu"] == [({**node, "gpu": "0", "name": "use"}, 0.9)]
    assert found.keys() <= HELP.keys()


@pytest.mark.parametrize("wrong", [0.0, -7200.0, 86400.0])
def test_node_points_last_while_file_grows(tmp_path: Path, wrong: float) -> None:
    made = job(tmp_path, "one")
    tell(made, "node_00_metrics.jsonl", {"time": NOW + wrong, "node": 0, "cpu": 0.5})
    os.utime(made.path / "outputs" / "node_00_metrics.jsonl", (NOW, NOW))
    assert points(tmp_path)["node_cpu_ratio"] == [({"experiment": made.name, "node": "a"}, 0.5)]
    assert "node_cpu_ratio" not in points(tmp_path, NOW + OLD_SECONDS + 1)


def test_unknown_goodput_is_left_out(tmp_path: Path) -> None:
    job(tmp_path, "foreign", goodput={"training": 0.0, "start": 10.0, "unknown": 90.0})
    assert "job_goodput_ratio" not in points(tmp_path)


def test_rank_time_uses_head_clock(tmp_path: Path) -> None:
    node = vars(NodeRecord(0, "a", "a", None, None, "10.0.0.1", "python", 0, 1, clock=-7200.0))
    made = job(tmp_path, "one", nodes=[node])
    tell(made, "rank_00_metrics.jsonl", {"time": NOW - 7200, "rank": 0, "step": 7})
    assert [value for _, value in points(tmp_path)["rank_told_timestamp_seconds"]] == [NOW]


def test_lost_loss_is_exposed_as_nan(tmp_path: Path) -> None:
    """Else an alarm would see the series end, as when a job is done."""
    made = job(tmp_path, "one")
    told = {"time": NOW, "rank": 0, "step": 7, "step_ms": 5.0, "mfu": None}
    tell(made, "rank_00_metrics.jsonl", {**told, "loss": 0.5}, {**told, "step": 8, "loss": None})
    assert [str(value) for _, value in points(tmp_path)["loss"]] == ["nan"]
    assert "mfu_ratio" not in points(tmp_path)
    text = format_metrics(Exposition(Where(experiments=tmp_path)).points(NOW))
    assert [line.rpartition(" ")[2] for line in text.splitlines() if "_loss{" in line] == ["NaN"]


def test_ended_job_is_exposed_for_a_while(tmp_path: Path) -> None:
    made = job(tmp_path, "one", state="failed", ended=NOW)
    assert points(tmp_path)["job_state"] == [({"experiment": made.name, "state": "failed"}, 1)]
    assert points(tmp_path, NOW + STAYS_SECONDS + 1) == {}
    (tmp_path / "broken_20260101_000000").mkdir()
    (tmp_path / "broken_20260101_000000" / "job.json").write_text("{")
    assert points(tmp_path, NOW).keys() == {
        "job_state",
        "job_attempt",
        "job_started_timestamp_seconds",
    }


def test_labels_are_escaped() -> None:
    bad = 'a"} 1\nevil{x="\\'
    text = format_metrics([("loss", {"experiment": bad}, 0.5), ("step", {"rank": "0"}, 1.0)])
    assert text.splitlines()[-1] == ('orchestrator_loss{experiment="a\\"} 1\\nevil{x=\\"\\\\"} 0.5')
    assert [line.split()[2] for line in text.splitlines() if "TYPE" in line] == [
        "orchestrator_step",
        "orchestrator_loss",
    ]


@pytest.mark.parametrize(
    ("token", "path", "headers", "code"),
    [
        ("s3cret", "/metrics?x", {"authorization": "Bearer s3cret"}, 200),
        ("s3cret", "/metrics", {"authorization": "Bearer s3cre"}, 401),
        ("s3cret", "/metrics", {"authorization": "Bearer \u00fc"}, 401),
        ("s3cret", "/metrics", {}, 401),
        ("s3cret", "/job.json", {"authorization": "Bearer s3cret"}, 404),
        ("", "/metrics", {}, 200),
        ("", "/metrics", {"host": "evil.example"}, 421),
    ],
)
def test_requests_need_path_and_token(
    tmp_path: Path, token: str, path: str, headers: dict[str, str], code: int
) -> None:
    job(tmp_path, "one")
    served = metrics_app(Exposition(Where(experiments=tmp_path)), token)
    got = asyncio.run(ask(served, path, headers=headers))
    assert got.code == code
    assert ("orchestrator_job_state{" in got.text) == (code == 200)


def test_grafana_dashboard_uses_existing_metrics() -> None:
    asked = set(re.findall(r"orchestrator_(\w+)", GRAFANA.read_text()))
    assert asked - {"jobs"} <= HELP.keys()
    assert {"loss", "step_seconds", "node_gpu", "job_state"} <= asked
