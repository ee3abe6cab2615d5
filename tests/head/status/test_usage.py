"""What jobs took, from what their experiments have kept."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.launch import Launch
from orchestrator.head.commands.kept import usage as command
from orchestrator.head.screen.output import PLAIN
from orchestrator.head.status import usage
from orchestrator.head.status.usage import Usage
from orchestrator.records.experiment import Attempt, Experiment, JobRecord
from tests.records.one_node import NODE
from tests.typed import typed

BEGAN = 1_790_000_000.0  # in September 2026


def kept(
    root: Path, name: str = "a_20260921_130000", *, gpus: int = 0, samples: Sequence[Any] = (),
    variables: dict[str, str] | None = None, **fields: Any,
) -> Experiment:  # fmt: skip
    """An experiment of an hour on one node, as its head left it."""
    outputs = root / "experiments" / name / "outputs"
    outputs.mkdir(mode=0o700, parents=True)
    experiment = Experiment(outputs.parent)
    record = JobRecord(
        job="j", experiment=str(experiment.path), state="done", command=[], nodes=[NODE],
        started=BEGAN, ended=BEGAN + 3600.0,
    )  # fmt: skip
    experiment.write_signed(replace(record, **fields))
    node = {"name": "a", "facts": {"gpus": gpus}, "environment": variables or {}}
    known = {"directory": str(root), "nodes": [node]}
    experiment.write("manifest.json", json.dumps(known))
    if samples:
        about = {"time": BEGAN, "node": 0, "about": {"host": "a", "gpus": ["H100"] * gpus}}
        lines = [about, *({"time": BEGAN + at, "node": 0, "gpu": gpu} for at, gpu in samples)]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (outputs / "node_00_metrics.jsonl").write_text(text)
    return experiment


def of(experiment: Experiment) -> Usage:
    return usage.of(experiment, BEGAN + 9e5)


WATTS = [(at, {"watts": [100.0, 260.0]}) for at in range(0, 3605, 5)]


def test_a_job_on_gpus(tmp_path: Path) -> None:
    parts = {"training": 2700.0, "start": 900.0}
    found = of(kept(tmp_path / "project", gpus=2, samples=WATTS, goodput=parts))
    assert (found.project, found.month) == ("project", "2026-09")
    assert (found.gpu_hours, found.slot_hours, found.useful_hours) == (2.0, 0.0, 1.5)
    assert found.energy_kwh == pytest.approx(0.36)


def test_what_was_not_measured_is_not_nothing(tmp_path: Path) -> None:
    """Slots have no power; a script tells no goodput; without a manifest nobody knows the GPUs."""
    found = of(kept(tmp_path))
    assert (found.gpu_hours, found.slot_hours) == (0.0, 1.0)
    assert found.energy_kwh is None and found.useful_hours is None
    bare = kept(tmp_path, "b_20260921_130000", gpus=8, samples=WATTS)
    (bare.path / "manifest.json").unlink()
    found = of(bare)
    assert (found.gpu_hours, found.slot_hours, found.energy_kwh, found.project) == (
        None, None, None, "?",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "variables", "hours"),
    [
        ({"launch": Launch(gpus=1)}, {}, 1.0),
        ({}, {"CUDA_VISIBLE_DEVICES": "0"}, 1.0),
        ({}, {}, 2.0),
    ],
)
def test_a_part_of_a_machine(
    tmp_path: Path, fields: dict[str, Any], variables: dict[str, str], hours: float
) -> None:
    """Which of the sampled GPUs it had is not known, and so not what it took."""
    experiment = kept(tmp_path, gpus=2, samples=WATTS, variables=variables, **fields)
    found = of(experiment)
    assert found.gpu_hours == hours
    assert (found.energy_kwh is None) == (hours < 2)


def test_an_hour_without_samples_took_nobody_knows_what(tmp_path: Path) -> None:
    samples = [(0, {"watts": [360.0]}), (10, {"watts": [360.0]}), (3600, {"watts": [360.0]})]
    found = of(kept(tmp_path, gpus=1, samples=samples))
    assert found.energy_kwh == pytest.approx(0.001)
    assert of(kept(tmp_path, "b_20260921_130000", gpus=1)).energy_kwh is None


def test_attempts_count_with_the_nodes_that_they_had(tmp_path: Path) -> None:
    attempt = Attempt(1, "j1", BEGAN, BEGAN + 1800, "failed", 1, None, ["a"], restarted=True)
    assert of(kept(tmp_path, gpus=4, attempts=[attempt])).gpu_hours == 4.0
    lost = kept(tmp_path, "b_20260921_130000", attempts=[replace(attempt, nodes=["a", "b"])])
    assert of(lost).gpu_hours is None


def test_a_job_whose_head_is_gone_ends_with_the_last_that_was_heard(tmp_path: Path) -> None:
    experiment = kept(tmp_path, gpus=1, state="running", ended=None)
    for path in (*experiment.path.iterdir(), experiment.path):
        os.utime(path, (BEGAN + 7200, BEGAN + 7200))
    assert of(experiment).gpu_hours == 2.0


def test_experiments_of_others_that_are_closed_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [kept(tmp_path, f"a_20260921_13000{n}").path for n in range(8)]
    real = Path.stat

    def stat(path: Path, **more: bool) -> os.stat_result:
        if path.parent in paths[1:]:
            raise PermissionError(13, "Permission denied")
        return real(path, **more)

    monkeypatch.setattr(Path, "stat", stat)
    _, unread = command.read([tmp_path / "experiments", tmp_path / "none"], 0.0, BEGAN)
    assert [why for path, why in unread if path in paths[1:]] == ["Permission denied"] * 7
    lines = command.to_text([], "user", unread, PLAIN).splitlines()
    assert len(lines) == 7 and lines[-1] == "not counted: 2 more: --json names them"


def test_the_command(tmp_path: Path) -> None:
    """Sums by project; what is half written, or closed to this login, is named and not counted."""
    parts = {"training": 900.0, "start": 2700.0}
    kept(tmp_path / "one", gpus=2, samples=WATTS, goodput=parts)
    kept(tmp_path / "two", gpus=1)
    kept(tmp_path / "two", "b_20260921_130001", gpus=2, samples=WATTS)
    half = kept(tmp_path / "two", "c_20260921_130002")
    (half.path / "job.json").write_text('{"job": "j", "sta')
    words = ["usage", "--experiments", "one/experiments", "two/experiments", "--by", "project"]
    code, out, _ = typed(words, tmp_path)
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["PROJECT", "JOBS", "GPU", "HOURS", "SLOT", "HOURS", "GPU", "KWH", "USEFUL"]
    assert rows[1] == ["one", "1", "2.0", "0.0", "0.36", "25%"]
    assert rows[2] == ["two", "2", "3.0", "0.0", "0.36+?", "?"]
    assert out.count("not counted: ") == 1 and "c_20260921_130002" in out
    code, out, _ = typed([*words, "--json", "--since", "1d"], tmp_path)
    assert (code, json.loads(out)["totals"]) == (0, [])
    assert time.time() > BEGAN
    code, out, _ = typed([*words, "--json"], tmp_path)
    one, two = json.loads(out)["totals"]
    assert one["goodput"] == 0.25 and one["unknown"]["energy_kwh"] == 0
    assert (two["known"]["useful_hours"], two["unknown"]["useful_hours"]) == (None, 2)
    assert (round(two["known"]["energy_kwh"], 3), two["unknown"]["energy_kwh"]) == (0.36, 1)
