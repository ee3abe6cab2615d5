"""Each tracker as it really is: what it was told is in its own files, and a run goes on there."""

import json
import os
import posixpath
import re
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from orchestrator.common.errors import UsageError
from orchestrator.config import schema
from orchestrator.trackers import known
from orchestrator.trackers.known import (
    KNOWN,
    Curves,
    Known,
    TensorBoard,
    accepted_name,
    open_tracker,
)

TWICE = """
import json, os, sys
from pathlib import Path
from orchestrator.trackers.known import KNOWN, Curves
name, first, step = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
tracker = KNOWN[name].open(Curves("f00d", "our run", step, Path("outputs")), **first)
for number in range(step + 1, step + 4):
    values = {"loss": 1.0 / number, "node/a b/cpu": 0.5, "a//b/": 1.0, "/<x>..": 2.0}
    tracker.log(values, number, 1.7e9 + number)
tracker.close()
"""


def test_known_trackers_match_config() -> None:
    assert tuple(KNOWN) == schema.TRACKERS


def test_tensorboard_drops_steps_of_earlier_attempt(tmp_path: Path) -> None:
    for step, last in ((0, 5), (3, 6)):  # the first got to 5, the second went on from 3
        tracker = TensorBoard(Curves("f00d", "our run", step, tmp_path))
        for number in range(step + 1, last + 1):
            tracker.log({"loss": float(number + step)}, number, 1.7e9 + number + step)
        tracker.close()
    curves = EventAccumulator(str(tmp_path / "tensorboard"))
    curves.Reload()
    points = [(point.step, point.value, point.wall_time) for point in curves.Scalars("loss")]
    assert [(step, value) for step, value, _ in points] == [
        *((1, 1), (2, 2), (3, 3)),
        *((4, 7), (5, 8), (6, 9)),
    ]
    assert [when - 1.7e9 for _, _, when in points] == [1, 2, 3, 7, 8, 9]


@given(st.text("ab./_ \u00e9<", max_size=8))
def test_mlflow_name_is_made_valid(name: str) -> None:
    # MLflow's own rule decides.
    own = accepted_name(name)
    assert re.fullmatch(r"[\w./ -]+", own)
    assert posixpath.normpath(own) == own != "."
    assert not own.startswith(("..", "/"))
    assert accepted_name("val/top 5") == "val/top 5"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_resumed_run_continues_curves(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name)
    environment = here(tmp_path)
    options = {"mlflow": {"experiment_name": "e"}}.get(name, {})
    for step in (0, 3):
        command = [sys.executable, "-c", TWICE, name, json.dumps(options), str(step)]
        subprocess.run(command, env=environment, cwd=tmp_path, check=True, timeout=300)
    told = {"wandb": of_wandb, "mlflow": of_mlflow}[name](tmp_path)
    assert told == [(step, pytest.approx(1.0 / step)) for step in range(1, 7)]


def here(directory: Path) -> dict[str, str]:
    return {
        **os.environ,
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": f"file:{directory}/mlruns",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }


class FakeClient:
    """Keeps metrics as MLflow does: all values of a step."""

    def __init__(self) -> None:
        self.points: list[Any] = []

    def log_batch(self, _run: str, metrics: list[Any]) -> None:
        self.points += metrics

    def get_run(self, _run: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(metrics={p.key: p.value for p in self.points}))

    def get_metric_history(self, _run: str, key: str) -> list[Any]:
        return [point for point in self.points if point.key == key]


def test_mlflow_keeps_first_value_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt got to 5 and had no time for its epoch, the second went on from 3."""
    client = FakeClient()
    module, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    run = SimpleNamespace(info=SimpleNamespace(run_id="r"))
    fields = ("key", "value", "timestamp", "step")
    entities.Metric = lambda *values: SimpleNamespace(  # type: ignore[attr-defined]
        **dict(zip(fields, values, strict=True))
    )
    for name, value in {
        "get_tracking_uri": lambda: "file:/here",
        "MlflowClient": lambda: client,
        "start_run": lambda **_: run,
    }.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    for start, end in ((0, 5), (3, 6)):
        tracker = KNOWN["mlflow"].open(Curves("a", step=start), run_id="r")
        for step in range(start + 1, end + 1):
            tracker.log({"a<b": float(start)}, step, 1.7e9)
        if start:
            tracker.log({"val_loss": 2.0}, 5, 1.7e9)
    told = [(point.key, point.step, point.value) for point in client.points]
    assert told == [
        *(("a_b", step, 0.0) for step in range(1, 6)),
        *(("a_b", 6, 3.0), ("val_loss", 5, 2.0)),
    ]


def test_mlflow_without_database_writes_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mlflow-skinny is, which `[trackers]` installs: its own default cannot be opened."""
    uris = ["sqlite:////x/mlflow.db"]
    module = ModuleType("mlflow")
    module.get_tracking_uri = lambda: uris[-1]  # type: ignore[attr-defined]
    module.set_tracking_uri = uris.append  # type: ignore[attr-defined]
    module.MlflowClient = FakeClient  # type: ignore[attr-defined]
    run = SimpleNamespace(info=SimpleNamespace(run_id="r"))
    module.start_run = lambda **_: run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", ModuleType("mlflow.entities"))
    monkeypatch.setattr(known, "find_spec", lambda _: None)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")
    KNOWN["mlflow"].open(Curves("a", directory=tmp_path / "a b"), run_id="r")
    assert uris[1:] == [f"file://{tmp_path}/a%20b/mlruns"]
    KNOWN["mlflow"].open(Curves("a", directory=tmp_path), run_id="r")
    assert len(uris) == 2, "what the user chose stays"


def of_wandb(directory: Path) -> list[tuple[int, float]]:
    """Read the files that `wandb sync` would send: two of one run."""
    runs = sorted((directory / "wandb").glob("offline-run-*"))
    assert [run.name.rpartition("-")[2] for run in runs] == ["f00d", "f00d"]
    lines = [line for line in lines_of(directory, "f00d") if "loss" in line]
    assert all(line["_timestamp"] == 1.7e9 + line["_step"] for line in lines)
    return [(line["_step"], line["loss"]) for line in lines]


def lines_of(directory: Path, run: str) -> list[dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    told = []
    for path in sorted((directory / "wandb").glob(f"offline-run-*-{run}/*.wandb")):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            told += [items] if items else []
    return told


def records(data: bytes) -> list[bytes]:
    """Return the records of a LevelDB log with blocks of 32 KiB, behind W&B's header."""
    found, at, part = list[bytes](), 7, b""
    while at + 7 <= len(data):
        # The block ends here if it has no room for a header.
        if (left := -at % 32768) and left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        # This is a whole record or its last part.
        if kind in (1, 4):
            found.append(part)
            part = b""
    return found


def of_mlflow(directory: Path) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = MlflowClient(f"file:{directory}/mlruns")
    experiment = client.get_experiment_by_name("e")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "our run"
    assert run.info.status == "FINISHED"
    points = client.get_metric_history(run.info.run_id, "loss")
    assert [point.timestamp for point in points] == [int((1.7e9 + p.step) * 1e3) for p in points]
    return [(point.step, point.value) for point in points]


class Strict:
    """A tracker that takes one option."""

    def __init__(self, curves: Curves, project: str = "") -> None: ...

    def log(self, values: Mapping[str, float], step: int, moment: float) -> None: ...

    def close(self) -> None: ...


def test_unknown_option_of_tracker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KNOWN, "strict", Known(Strict, "json", "json"))
    assert isinstance(open_tracker("strict", Curves("a"), {"project": "p"}), Strict)
    with pytest.raises(UsageError, match=r"strict could not be opened: .*'projekt'"):
        open_tracker("strict", Curves("a"), {"projekt": "p"})
