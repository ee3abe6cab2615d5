"""Numbers come to a tracker once, whoever passes them on, and however often."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from orchestrator.config.launch import Where
from orchestrator.errors import UsageError
from orchestrator.head.commands.experiments import track
from orchestrator.records.experiment import Experiment
from tests.head.track.jobs import NOW, job, tell

BOTH = ["tensorboard"]


def curves(made: Experiment) -> dict[str, list[tuple[int, float]]]:
    read = EventAccumulator(str(made.path / "outputs" / "tracked" / "tensorboard"))
    read.Reload()
    return {
        name: [(point.step, round(point.value, 6)) for point in read.Scalars(name)]
        for name in read.Tags()["scalars"]
    }


def typed(root: Path, made: Experiment) -> str:
    words = ["track", "--experiments", str(root), made.name, "--to", *BOTH]
    command = [sys.executable, "-m", "orchestrator", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_each_line_once_also_when_called_again(tmp_path: Path) -> None:
    made = job(tmp_path, "one", state="done", ended=NOW)
    steps = [{"time": NOW + step, "rank": 0, "step": step, "loss": 1 / step} for step in (1, 2, 3)]
    again = {"time": NOW + 9, "rank": 0, "step": 2, "loss": 0.5}  # by a second attempt
    tell(made, "rank_00_metrics.jsonl", *steps, again)
    node = {"node": 0, "cpu": 0.5, "net": {"eth0": [1.0, 2.0]}, "disks": {"/": [1.0, 4.0]}}
    tell(
        made,
        "node_00_metrics.jsonl",
        {"time": NOW, "node": 0, "about": {"host": "a b"}},
        {"time": NOW + 5, **node, "gpu": {"use": [0.5, None]}},
    )
    assert "4 lines" in typed(tmp_path, made)
    found = curves(made)
    assert found["loss"] == [(1, 1.0), (2, 0.5), (3, round(1 / 3, 6))]
    assert found["node/a b/cpu"] == [(65, 0.5)]  # seconds since the start
    assert found["node/a b/disk//used"] == [(65, 0.75)]
    assert found["node/a b/gpu/0/use"] == [(65, 0.5)]
    assert "node/a b/gpu/1/use" not in found
    with (made.path / "outputs" / "rank_00_metrics.jsonl").open("a") as file:
        file.write('{"time": 1700000009, "step": 2, "loss": 9}\n')
        file.write('{"time": 1700000010, "step": 4, "loss": 0.25}\n{"time": 17')
    assert f"1 line of {made.name} passed on to tensorboard" in typed(tmp_path, made)
    assert curves(made)["loss"] == [*found["loss"], (4, 0.25)]
    assert curves(made)["node/a b/cpu"] == [(65, 0.5)]


def test_a_second_one_is_refused_while_one_tracks(tmp_path: Path) -> None:
    made = job(tmp_path, "one", state="done", ended=NOW)
    assert Experiment(made.path).hold(track.TRACKING)
    with pytest.raises(UsageError, match="tracked already"):
        track.track(Where(experiments=tmp_path), made.name, BOTH, [])
    assert not Experiment(made.path).hold(track.TRACKING)


@pytest.mark.parametrize(
    ("to", "options", "says"),
    [
        (["tensorbord"], [], "did you mean 'tensorboard'"),
        (["tensorboard"], ["wandb.project=p"], "not TRACKER.OPTION=VALUE"),
        (["tensorboard"], ["tensorboard.logdri=x"], "tensorboard could not be opened"),
    ],
)
def test_mistakes_are_said(tmp_path: Path, to: list[str], options: list[str], says: str) -> None:
    made = job(tmp_path, "one", state="done", ended=NOW)
    with pytest.raises(UsageError, match=says):
        track.track(Where(experiments=tmp_path), made.name, to, options)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "a-name"])
def test_others_are_not_served_without_a_word(tmp_path: Path, host: str) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(UsageError, match="anybody in the network"):
        track.token_of(track.Listen(host, 0, None))
    with pytest.raises(UsageError, match="is empty"):
        track.token_of(track.Listen(host, 0, empty))
    assert track.token_of(track.Listen("127.0.0.1", 0, None)) == ""
