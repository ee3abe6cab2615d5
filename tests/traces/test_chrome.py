"""Traces are read piece by piece, and give what they would give whole."""

import gzip
import json
from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.traces import timeline
from orchestrator.traces.timeline import read_trace

# Made by hand in the layout that torch 2.13 writes on a machine with CUDA.
CUDA = Path(__file__).parent / "cuda_rank_03.json"


@pytest.mark.parametrize("piece", [7, 64, 1 << 20])
@pytest.mark.parametrize("packed", [False, True])
def test_events_are_read_in_pieces_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, packed: bool
) -> None:
    text = CUDA.read_text().replace('"aten::mm"', '"aten::漢字 ]}, {"')
    text = text.replace('"aten::漢字 ]}, {"', '"aten::漢字 ]}, \\"{"')
    path = tmp_path / "any name"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    monkeypatch.setattr(timeline, "PIECE_BYTES", piece)
    whole = json.loads(text)
    with timeline.open_trace(path) as trace:
        most = 0
        events = []
        for event in trace.events():
            events.append(event)
            most = max(most, len(trace.text))
    assert events == whole["traceEvents"]
    assert trace.rank == 3
    assert piece > 64 or most < 3000, "no more than one event and the header are kept"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"traceEvents": [', "Expecting value"),
        ('{"traceEvents": [{"ph": "X"}', "Expecting value"),
        ('{"traceEvents": [{"ph": "X", "na', "Unterminated"),
        ('{"traceEvents": [3]}', "an event is not an object"),
        ('{"x": "traceEvents"}', "no list of traceEvents"),
        ('{"x": {], "traceEvents": []}', "Expecting"),
    ],
)
def test_truncated_trace_is_explained(tmp_path: Path, text: str, why: str) -> None:
    (path := tmp_path / "trace.json").write_text(text)
    with (
        pytest.raises(UsageError, match=f"trace.json is not a Chrome trace: .*{why}"),
        timeline.open_trace(path) as trace,
    ):
        list(trace.events())


def test_oversized_trace_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "LARGEST_CHARACTERS", 1 << 12)
    monkeypatch.setattr(timeline, "PIECE_BYTES", 1 << 10)
    (path := tmp_path / "trace.json").write_text('{"traceEvents": [{"a": "' + "x" * (1 << 16))
    with pytest.raises(UsageError), timeline.open_trace(path) as trace:
        list(trace.events())
    monkeypatch.setattr(timeline, "MOST_BYTES", 1 << 14)
    path.write_text('{"traceEvents": [' + '{"a": 1}, ' * 4000)
    with (
        pytest.raises(UsageError, match="unfolds to more than"),
        timeline.open_trace(path) as trace,
    ):
        list(trace.events())


def test_error_of_consumer_is_raised() -> None:
    with pytest.raises(OSError, match="disk full"), timeline.open_trace(CUDA) as trace:
        for _ in trace.events():
            raise OSError("disk full")


def test_gpu_trace_is_divided() -> None:
    number, found = read_trace(CUDA)
    assert (number, found.steps) == (3, 2)
    # The window spans the first to the last kernel.
    assert found.window_ms == 20
    assert (found.compute_ms, found.communication_ms) == (13, 5)
    assert (found.overlapped_ms, found.exposed_ms) == (1, 4)
    # The host waited for data 2.5 ms; the GPU was idle in 2 of them. Its first 0.9 ms lie before.
    assert (found.data_ms, found.idle_ms) == (2, 1)


@pytest.mark.parametrize(
    ("times", "why"),
    [
        ('"ts": 1%s' % ("0" * 400), "too large"),
        ('"ts": NaN', "a time of nan"),
        ('"ts": 1, "dur": Infinity', "a time of inf"),
        ('"ts": "now"', "could not convert"),
    ],
)
def test_invalid_time_is_refused(tmp_path: Path, times: str, why: str) -> None:
    event = f'{{"ph": "X", "cat": "kernel", "name": "gemm", "tid": 7, {times}}}'
    (path := tmp_path / "trace.json").write_text(f'{{"traceEvents": [{event}]}}')
    with pytest.raises(UsageError, match=f"trace.json is not a Chrome trace: .*{why}"):
        read_trace(path)
