"""The traces of a directory: which they are, and whose."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.views.profile import command

CUDA = Path(__file__).parents[2] / "traces" / "cuda_rank_03.json"
BASE = 1_790_857_026_000_000.0  # microseconds


def cpu_trace(path: Path, rank: int, node: int, ahead_ms: float, slow_ms: float = 0) -> None:
    """A rank over gloo, whose clock is ahead; the all-reduce ends for all at 90 ms."""
    at = (1000 + ahead_ms) * 1e3

    def event(name: str, cat: str, start: float, end: float, tid: int) -> dict[str, Any]:
        times = {"ts": at + start * 1e3, "dur": (end - start) * 1e3}
        args = {"External id": 1, "Record function id": 0}
        return {"ph": "X", "cat": cat, "name": name, "pid": 77, "tid": tid, **times, "args": args}

    about = {"rank": rank, "node": node, "host": f"host{node}", "first": 5, "last": 5}
    events = [
        {"ph": "M", "name": "process_labels", "pid": 77, "tid": 0, "args": {"labels": "CPU"}},
        {"ph": "M", "name": "thread_name", "pid": 77, "tid": 77, "args": {"name": "thread 77"}},
        event("ProfilerStep#1", "user_annotation", 0, 100, 77),
        event("aten::mm", "cpu_op", 0, 40 + slow_ms, 77),
        event("aten::mul", "cpu_op", 10, 20, 77),
        event("c10d::allreduce_", "cpu_op", 41 + slow_ms, 41.5 + slow_ms, 77),
        event("gloo:all_reduce", "user_annotation", 42 + slow_ms, 90, 78),
        {"ph": "s", "id": 1, "pid": 77, "tid": 77, "ts": at, "cat": "fwdbwd", "name": "fwdbwd"},
        {**event("PyTorch Profiler (0)", "Trace", 0, 100, 0), "pid": "Spans", "tid": "PyTorch"},
    ]
    data = {
        "orchestrator": about,
        "baseTimeNanoseconds": int(BASE * 1e3),
        "traceEvents": events,
    }
    with gzip.open(path, "wt") as file:
        json.dump(data, file, indent=1)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Rank 1 is on a node whose clock is 250 ms ahead, and computes 30 ms longer."""
    cpu_trace(tmp_path / "rank_00.json.gz", 0, 0, 0)
    cpu_trace(tmp_path / "rank_01.json.gz", 1, 1, 250, slow_ms=30)
    for other in ("summary.json", "clocks.json", "notes.txt", ".rank_02.json.gz"):
        (tmp_path / other).write_text("{}")
    return tmp_path


def test_newest_profile_is_taken(tmp_path: Path) -> None:
    for age, name in ((30, "step_00000010"), (10, "step_00000002"), (20, "")):
        (tmp_path / name).mkdir(exist_ok=True)
        path = tmp_path / name / "rank_00.json.gz"
        cpu_trace(path, 0, 0, 0)
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "step_00000099").mkdir()
    assert command.newest_traces(tmp_path) == tmp_path / "step_00000002"
    assert command.newest_traces(tmp_path / "nowhere") is None


def test_two_traces_of_one_rank_are_refused(directory: Path) -> None:
    cpu_trace(directory / "rank_07.json.gz", 1, 1, 0)
    with pytest.raises(UsageError, match=r"rank_07\.json\.gz is a second trace of rank 1"):
        command.read_traces(command.paths_in(directory))


def test_host_name_of_node_is_cleaned(tmp_path: Path) -> None:
    about = {"rank": 0, "host": "a\x01\ud800<b>"}
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "tid": 7, "ts": 1, "dur": 2}
    text = json.dumps({"orchestrator": about, "traceEvents": [event]})
    (tmp_path / "rank_00.json").write_text(text)
    (trace,) = command.read_traces(command.paths_in(tmp_path))
    assert trace.host == "a\u2401?<b>"
