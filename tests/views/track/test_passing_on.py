"""Numbers reach a tracker once with several senders and repeated sends."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from orchestrator.common.errors import EXIT_FAILED, UsageError
from orchestrator.config.launch import Where
from orchestrator.records.experiment import Attempt, Experiment, NodeRecord
from orchestrator.trackers.known import KNOWN, Curves, Known
from orchestrator.views.track import command
from orchestrator.views.track import command as track
from orchestrator.views.track.command import PassingOn
from tests.views.track.jobs import NOW, job, tell

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


@pytest.mark.slow
def test_each_line_is_passed_on_once(tmp_path: Path) -> None:
    made = job(tmp_path, "one", state="done", ended=NOW)
    steps = [{"time": NOW + step, "rank": 0, "step": step, "loss": 1 / step} for step in (1, 2, 3)]
    # A second attempt wrote this step.
    again = {"time": NOW + 9, "rank": 0, "step": 2, "loss": 0.5}
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
    # These are seconds since the start.
    assert found["node/a b/cpu"] == [(65, 0.5)]
    assert found["node/a b/disk/used"] == [(65, 0.75)]
    assert found["node/a b/gpu/0/use"] == [(65, 0.5)]
    assert "node/a b/gpu/1/use" not in found
    with (made.path / "outputs" / "rank_00_metrics.jsonl").open("a") as file:
        file.write('{"time": 1700000009, "step": 2, "loss": 9}\n')
        file.write('{"time": 1700000010, "step": 4, "loss": 0.25}\n{"time": 17')
    assert f"1 line of {made.name} passed on to tensorboard" in typed(tmp_path, made)
    assert curves(made)["loss"] == [*found["loss"], (4, 0.25)]
    assert curves(made)["node/a b/cpu"] == [(65, 0.5)]


def test_second_track_of_job_is_refused(tmp_path: Path) -> None:
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
def test_invalid_arguments_are_refused(
    tmp_path: Path, to: list[str], options: list[str], says: str
) -> None:
    made = job(tmp_path, "one", state="done", ended=NOW)
    with pytest.raises(UsageError, match=says):
        track.track(Where(experiments=tmp_path), made.name, to, options)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "a-name"])
def test_open_host_needs_token(tmp_path: Path, host: str) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(UsageError, match="anybody in the network"):
        track.token_of(host, None)
    with pytest.raises(UsageError, match="is empty"):
        track.token_of(host, empty)
    assert track.token_of("127.0.0.1", None) == ""


def steps(*wanted: int, at: float = NOW) -> list[dict[str, object]]:
    return [{"time": at + s, "rank": 0, "step": s, "loss": s / 2} for s in wanted]


def test_moments_use_head_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's own clock is known in the record, and of an earlier attempt that of its node."""
    node = vars(NodeRecord(0, "a", "a", None, None, "10.0.0.1", "python", 0, 1, clock=3600.0))
    before = Attempt(1, NOW - 60, NOW + 10, "failed", 1, None, ["b"], clock=-60.0)
    first = {**vars(before), "restarted": True}
    made = job(tmp_path, "one", nodes=[node], attempts=[first])
    tell(
        made,
        "rank_00_metrics.jsonl",
        {"time": NOW - 60, "step": 1, "loss": 1},
        {"time": NOW + 3620, "step": 2, "loss": 1},
    )
    tell(
        made,
        "node_00_metrics.jsonl",
        {"time": NOW + 3600, "about": {"host": "a"}},
        {"time": NOW + 3605, "cpu": 0.5},
    )
    heard = Heard()
    monkeypatch.setitem(KNOWN, "own", Known(heard.open, "json", "own"))
    record = made.read_record()
    for kind in ("training", "nodes"):
        PassingOn(made, record, kind, "own", {}).pass_on(record)
    assert heard.moments == [(1, NOW), (2, NOW + 20), (65, NOW + 5)]


class Heard:
    """A tracker that fails at some step."""

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at
        self.moments: list[tuple[int, float]] = []

    def open(self, _: Curves) -> "Heard":
        return self

    def log(self, _: Mapping[str, float], step: int, moment: float) -> None:
        if step == self.fails_at:
            raise ConnectionError("no network")
        self.moments.append((step, moment))

    def close(self) -> None:
        pass


def test_lines_not_taken_by_tracker_are_resent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PIECE_BYTES", 128)
    made, first, later = job(tmp_path, "one"), Heard(fails_at=30), Heard()
    tell(made, "rank_00_metrics.jsonl", *steps(*range(40)))
    record = made.read_record()
    for heard in (first, later):
        monkeypatch.setitem(KNOWN, "own", Known(heard.open, "json", "own"))
        with contextlib.suppress(ConnectionError):
            PassingOn(made, record, "training", "own", {}).pass_on(record)
    assert first.moments[-1][0] == 29
    told = [step for step, _ in later.moments]
    assert told == list(range(told[0], 40)) and 0 < told[0] <= 30


def test_failing_tracker_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = job(tmp_path, "one", state="done", ended=NOW)
    tell(made, "rank_00_metrics.jsonl", *steps(1))
    (tmp_path / "file").write_text("")
    said: list[str] = []
    monkeypatch.setattr(track, "say", said.append)
    bad, good = Heard(fails_at=1), Heard()
    monkeypatch.setitem(KNOWN, "bad", Known(bad.open, "json", "bad"))
    monkeypatch.setitem(KNOWN, "good", Known(good.open, "json", "good"))
    names, options = ["tensorboard", "bad", "good"], [f"tensorboard.log_dir={tmp_path}/file/x"]
    assert track.track(Where(experiments=tmp_path), made.name, names, options) == EXIT_FAILED
    one, other = (line for line in said if "WARNING" in line)
    assert re.match(r"WARNING: tensorboard could not be opened, .*Not a directory", one)
    assert other == "WARNING: bad failed and is switched off from now on: no network"
    assert [step for step, _ in good.moments] == [1]
    assert said[-1] == f"1 line of {made.name} passed on to tensorboard, bad, good"
