"""The traces of a directory: which they are, whose, and on which clock; then all in one file."""

from __future__ import annotations

import gzip
import json
import os
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.head.screen.output import PLAIN
from orchestrator.views.profile import found, merged, telling
from orchestrator.views.profile.found import Clocks

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


def test_the_newest_profile_is_taken(tmp_path: Path) -> None:
    for age, name in ((30, "step_00000010"), (10, "step_00000002"), (20, "")):
        (tmp_path / name).mkdir(exist_ok=True)
        path = tmp_path / name / "rank_00.json.gz"
        cpu_trace(path, 0, 0, 0)
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "step_00000099").mkdir()
    assert found.newest(tmp_path) == tmp_path / "step_00000002"
    assert found.newest(tmp_path / "nowhere") is None


def test_two_traces_of_one_rank_are_refused(directory: Path) -> None:
    cpu_trace(directory / "rank_07.json.gz", 1, 1, 0)
    with pytest.raises(UsageError, match=r"rank_07\.json\.gz is a second trace of rank 1"):
        found.read(found.paths_in(directory))


@pytest.mark.parametrize(
    ("measured", "how", "ahead"),
    [
        ({0: (0.0, 1e-4), 1: (0.25, 2e-4)}, "measured", 250_000),
        ({0: (0.0, 1e-4)}, "collectives", 250_000),  # a node that did not answer
        ({}, "collectives", 250_000),
    ],
)
def test_all_ranks_are_on_one_clock(
    directory: Path, measured: dict[int, tuple[float, float]], how: str, ahead: float
) -> None:
    traces = found.read(found.paths_in(directory))
    assert [trace.label for trace in traces] == ["rank 0 (host0)", "rank 1 (host1)"]
    clocks = found.clocks(traces, measured)
    assert clocks.how == how
    assert clocks.ahead == pytest.approx({0: 0, 1: ahead})
    assert clocks.error_ms == (pytest.approx(0.2) if how == "measured" else None)


def test_ranks_without_a_collective_keep_their_clocks(directory: Path) -> None:
    (directory / "rank_03.json").write_bytes(CUDA.read_bytes())
    clocks = found.clocks(found.read(found.paths_in(directory)), {})
    assert (clocks.how, set(clocks.ahead.values())) == ("none", {0.0})


# -- all in one file ------------------------------------------------------------------------------


def check_format(path: Path) -> list[dict[str, Any]]:
    """Hold the file to the trace-event format, and to what Perfetto asks beyond it."""
    with gzip.open(path, "rt") as file:
        data = json.load(file)
    assert isinstance(data["traceEvents"], list)
    events: list[dict[str, Any]] = data["traceEvents"]
    threads: dict[int, int] = {}
    named: set[int] = set()
    flows: defaultdict[Any, list[str]] = defaultdict(list)
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int), event
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            if event["name"] == "process_name":
                assert event["pid"] not in named, "a process has one name"
                named.add(event["pid"])
            continue
        assert event["ph"] in "Xsfi" and event["ts"] >= 0
        assert event["pid"] in named, "its process was named before"
        assert threads.setdefault(event["tid"], event["pid"]) == event["pid"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] in "sf":
            flows[event["id"]].append(event["ph"])
    assert all(Counter(ends)["s"] <= 1 for ends in flows.values()), "arrows of ranks are apart"
    return events


def test_one_trace_of_all_ranks(directory: Path) -> None:
    (directory / "rank_03.json").write_bytes(CUDA.read_bytes())
    traces = found.read(found.paths_in(directory))
    clocks = Clocks("measured", {0: 0, 1: 250_000, 3: 4485597e6 - 1000e3})
    out = directory / found.MERGED
    assert merged.write(traces, clocks, out) == 0
    events = check_format(out)
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0 (host0)", "rank 1 (host1)", "rank 3 (gpu02)", "rank 3 (gpu02) GPU 0"]
    assert "stream 7 " in [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    ends = [e["ts"] + e["dur"] for e in events if e["name"] == "gloo:all_reduce"]
    assert ends == pytest.approx([90e3, 90e3], abs=0.01)
    (gemm,) = (event for event in events if event["name"].startswith("nvjet"))
    assert (gemm["ts"], gemm["dur"]) == pytest.approx((2000, 3000), abs=0.01)
    assert gemm["args"]["stream"] == 7
    assert not [event for event in events if event.get("cat") == "Trace"]
    assert found.paths_in(directory) == [trace.path for trace in traces], "it is none of them"


def test_the_shortest_are_left_out_where_there_are_too_many(directory: Path) -> None:
    traces = found.read(found.paths_in(directory))
    out = directory / found.MERGED
    left_out = merged.write(traces, Clocks("none", {0: 0, 1: 0}), out, most=8)
    events = [event for event in check_format(out) if event["ph"] == "X"]
    assert (len(events), left_out) == (8, 2)
    assert "c10d::allreduce_" not in {event["name"] for event in events}


# -- told and drawn -------------------------------------------------------------------------------


def reading(directory: Path) -> telling.Reading:
    return telling.read(directory, found.read(found.paths_in(directory)), {})


def test_it_is_told_in_a_table_and_in_json(directory: Path) -> None:
    about = reading(directory)
    lines = telling.in_words(about, PLAIN).splitlines()
    assert lines[0].split() == ["RANK", "HOST", "STEP", "COMPUTE", "EXPOSED", "IDLE", "COMM",
                                "WAITED"]  # fmt: skip
    assert lines[1].split() == ["0", "host0", "100.0", "40.0", "48.0", "12.0", "48.0", "30.0"]
    assert lines[2].split() == ["1", "host1", "100.0", "70.0", "18.0", "12.0", "18.0", "0.0",
                                "slowest"]  # fmt: skip
    assert lines[3].startswith("step 5, milliseconds per step; communication is 33% of the time")
    assert ["60.00", "1", "aten::mm"] in [line.split() for line in lines]  # less aten::mul
    assert any("hint: the others wait for rank 1 (host1) 30% of the step" in x for x in lines)
    data = json.loads(json.dumps(telling.as_data(about, {})))
    assert (data["steps"], data["slowest"], data["clocks"]["how"]) == ([5, 5], 1, "collectives")
    one = data["ranks"]["1"]
    parts = ("compute", "hidden", "exposed", "copies", "data", "idle")
    assert sum(one[f"{name}_ms"] for name in parts) == pytest.approx(one["step_ms"])
    assert one["top"][0] == {"name": "aten::mm", "ms": 60, "calls": 1}
    assert data["hint"]["kind"] == "slow rank"


def test_the_bars_are_as_long_as_the_parts(directory: Path) -> None:
    about = reading(directory)
    root = ET.fromstring(telling.draw(about.overlap, about.label, "a <run> & more"))
    bars = [bar for bar in root.iter("{http://www.w3.org/2000/svg}rect") if len(bar)]
    widths = {bar[0].text: float(bar.attrib["width"]) for bar in bars}
    whole = telling.WIDTH - telling.LEFT - telling.RIGHT
    assert widths["rank 0 (host0): computing 40 ms, 40% of the step"] == pytest.approx(
        0.4 * whole, abs=0.02
    )
    assert sum(widths.values()) == pytest.approx(2 * whole, abs=0.1)
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a <run> & more" in words and "rank 1 (host1) slowest" in words
    assert "waiting for data" not in words, "what no rank has is not in the legend"


@pytest.mark.parametrize("longest", [0.004, 0.3, 1, 7, 99.9, 100, 1026, 250_000])
def test_an_axis_has_a_few_round_numbers(longest: float) -> None:
    ticks = telling.ticks(longest)
    assert ticks[0] == 0 and 2 <= len(ticks) <= 9 and ticks[-1] <= longest


def test_a_host_of_a_node_cannot_break_the_picture(tmp_path: Path) -> None:
    about = {"rank": 0, "host": "a\x01\ud800<b>"}
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "tid": 7, "ts": 1, "dur": 2}
    text = json.dumps({"orchestrator": about, "traceEvents": [event]})
    (tmp_path / "rank_00.json").write_text(text)
    reading = telling.read(tmp_path, found.read(found.paths_in(tmp_path)), {})
    drawn = telling.draw(reading.overlap, reading.label, "x").encode()
    assert "rank 0 (a\u2401?<b>)" in [each.text for each in ET.fromstring(drawn).iter()]
