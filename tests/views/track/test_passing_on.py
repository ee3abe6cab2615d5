"""Numbers come to a tracker once, whoever passes them on, and however often."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from orchestrator.common.errors import EXIT_FAILED, UsageError
from orchestrator.config.launch import Where
from orchestrator.records.experiment import Attempt, Experiment, NodeRecord
from orchestrator.trackers import sending
from orchestrator.trackers.known import KNOWN, Curves, Known
from orchestrator.views.track import command as track
from orchestrator.views.track import passing_on
from orchestrator.views.track.passing_on import OfNodes, OfRanks
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
    assert found["node/a b/disk/used"] == [(65, 0.75)]
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
        track.token_of(host, None)
    with pytest.raises(UsageError, match="is empty"):
        track.token_of(host, empty)
    assert track.token_of("127.0.0.1", None) == ""


def steps(*wanted: int, at: float = NOW) -> list[dict[str, object]]:
    return [{"time": at + s, "rank": 0, "step": s, "loss": s / 2} for s in wanted]


@pytest.mark.slow
def test_every_trainer_of_a_program_is_told(tmp_path: Path) -> None:
    """Such as a second fit, an evaluation, the other half of a GAN: steps of each begin again."""
    made = job(tmp_path, "one", state="done", ended=NOW)
    tell(made, "rank_00_metrics.jsonl", *steps(1, 2, 3))
    tell(made, "rank_00_metrics_2.jsonl", *steps(1, 2))
    tell(made, "rank_00_metrics_12.jsonl", *steps(1))
    tell(made, "rank_01_metrics_2.jsonl", *steps(7))
    assert "6 lines" in typed(tmp_path, made)
    found = curves(made)
    assert found["loss"] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert found["trainer_2/loss"] == [(1, 0.5), (2, 1.0)]
    assert found["trainer_12/loss"] == [(1, 0.5)]
    tell(made, "rank_00_metrics_2.jsonl", *steps(1, 2, 3))
    assert "1 line of" in typed(tmp_path, made)
    assert curves(made)["trainer_2/loss"] == [(1, 0.5), (2, 1.0), (3, 1.5)]


@pytest.mark.slow
def test_a_file_that_was_cut_off_and_grew_again_loses_no_step(tmp_path: Path) -> None:
    """Its first rank went on from step 2, and was further than before when somebody looked."""
    made = job(tmp_path, "one", state="done", ended=NOW)
    tell(made, "rank_00_metrics.jsonl", *steps(1, 2, 3, 4))
    typed(tmp_path, made)
    tell(made, "rank_00_metrics.jsonl", *steps(1, 2), *steps(*range(3, 40), at=NOW + 0.5))
    typed(tmp_path, made)
    assert dict(curves(made)["loss"]) == {step: step / 2 for step in range(1, 40)}


def test_moments_are_of_the_heads_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's own clock is known in the record, and of an earlier attempt that of its node."""
    node = vars(NodeRecord(0, "a", "a", None, None, "10.0.0.1", "python", 0, 1, clock=3600.0))
    before = Attempt(1, "x", NOW - 60, NOW + 10, "failed", 1, None, ["b"], clock=-60.0)
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
    heard: list[tuple[int, float]] = []

    class Clock(Slow):
        def log(self, _: Mapping[str, float], step: int, moment: float) -> None:
            heard.append((step, moment))

    monkeypatch.setitem(KNOWN, "slow", Known(Clock().open, "json", "slow"))
    for kind in (OfRanks, OfNodes):
        passing = kind(made, made.read_record(), "slow", {}, said.append)
        passing.pass_on(passing.record)
        passing.to.close()
    assert heard == [(1, NOW), (2, NOW + 20), (65, NOW + 5)]


def test_a_tracker_whose_server_does_not_answer_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow asks one that is down for many minutes, without a word."""
    made = job(tmp_path, "one", state="done", ended=NOW)
    heard: list[str] = []
    told = threading.Event()

    def say(what: str) -> None:
        heard.append(what)
        told.set()

    def opened(_: Curves) -> Slow:
        assert told.wait(60)
        raise ConnectionError("no server")

    monkeypatch.setattr(track, "say", say)
    monkeypatch.setattr(track, "SLOW_SECONDS", 0.01)
    monkeypatch.setitem(KNOWN, "tensorboard", Known(opened, "json", "tensorboard"))
    assert track.track(Where(experiments=tmp_path), made.name, ["tensorboard"], []) == EXIT_FAILED
    assert heard == [
        "waiting for tensorboard to answer; Ctrl-C leaves, and the job continues",
        "WARNING: tensorboard could not be opened, and gets no values: no server",
        f"0 lines of {made.name} passed on to tensorboard",
    ]


class Slow:
    """A tracker that takes a line when it may, and fails at some step."""

    def __init__(self, fails_at: int = -1) -> None:
        self.may, self.fails_at = threading.Semaphore(0), fails_at
        self.heard: list[tuple[int, str]] = []

    def open(self, _: Curves) -> Slow:
        return self

    def log(self, values: Mapping[str, float], step: int, moment: float) -> None:
        assert self.may.acquire(timeout=60)
        if step == self.fails_at:
            raise ConnectionError("no network")
        self.heard += [(step, name) for name in values]

    def close(self) -> None:
        pass


def steps_of(made: Experiment, slow: Slow, monkeypatch: pytest.MonkeyPatch) -> OfRanks:
    monkeypatch.setitem(KNOWN, "slow", Known(slow.open, "json", "slow"))
    return OfRanks(made, made.read_record(), "slow", {}, said.append)


said: list[str] = []


def test_a_slow_tracker_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "WAITING_LINES", 8)
    monkeypatch.setattr(passing_on, "PIECE_BYTES", 128)
    said.clear()
    made, slow = job(tmp_path, "one"), Slow()
    tell(made, "rank_00_metrics.jsonl", *({"time": NOW, "step": s, "loss": 1} for s in range(60)))
    passing = steps_of(made, slow, monkeypatch)
    looks = 1
    while not passing.pass_on(passing.record):
        slow.may.release()
        looks += 1
    assert looks > 10
    slow.may.release(60)
    passing.to.close()
    passing.keep()
    assert slow.heard == [(step, "loss") for step in range(60)]
    assert said == []
    again = steps_of(made, Slow(), monkeypatch)
    assert again.pass_on(again.record)  # and none of them again


def test_what_a_tracker_did_not_take_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passing_on, "PIECE_BYTES", 128)
    made, slow = job(tmp_path, "one"), Slow(fails_at=30)
    tell(made, "rank_00_metrics.jsonl", *({"time": NOW, "step": s, "loss": 1} for s in range(40)))
    passing = steps_of(made, slow, monkeypatch)
    slow.may.release(90)
    passing.pass_on(passing.record)
    passing.to.thread.join(60)
    with (made.path / "outputs" / "rank_00_metrics.jsonl").open("a") as file:
        file.write(json.dumps({"time": NOW, "step": 40, "loss": 1}) + "\n")
    passing.pass_on(passing.record)
    passing.to.close()
    passing.keep()
    later = Slow()
    later.may.release(90)
    passing = steps_of(made, later, monkeypatch)
    passing.pass_on(passing.record)
    passing.to.close()
    assert slow.heard[-1] == (29, "loss")
    assert later.heard[-1] == (40, "loss") and (30, "loss") in later.heard
    assert later.heard[0][0] > 0  # what it took is not told again but for a piece


def test_a_tracker_that_cannot_be_opened_costs_its_curves_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(tmp_path, "one", state="done", ended=NOW)
    tell(made, "rank_00_metrics.jsonl", {"time": NOW, "rank": 0, "step": 1, "loss": 0.5})
    (tmp_path / "file").write_text("")
    heard: list[str] = []
    monkeypatch.setattr(track, "say", heard.append)
    other = Slow()
    other.may.release(90)
    monkeypatch.setitem(KNOWN, "trackio", Known(lambda _: other, "json", "trackio"))
    code = track.track(
        Where(experiments=tmp_path), made.name, ["tensorboard", "trackio"],
        [f"tensorboard.log_dir={tmp_path}/file/x"],
    )  # fmt: skip
    warning, *_ = heard
    assert code == EXIT_FAILED and len([line for line in heard if "WARNING" in line]) == 1
    assert re.match(r"WARNING: tensorboard could not be opened, .*Not a directory", warning)
    assert (1, "loss") in other.heard
