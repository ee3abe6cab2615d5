"""Many intervals cost as much as they are many, also where merging them wins nothing."""

from __future__ import annotations

import pytest

from orchestrator.traces import intervals
from orchestrator.traces.rank import Event, of_rank


def test_kernels_that_never_touch_are_merged_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "MANY", 16)
    merged = intervals._merged
    looked_at = []

    def counted(given: intervals.Intervals) -> intervals.Intervals:
        looked_at.append(len(given))
        return merged(given)

    monkeypatch.setattr(intervals, "_merged", counted)
    count = 4000
    for kind in ("kernel", "gpu_memcpy"):
        looked_at.clear()
        events = [Event("gemm", "kernel", 7, -9.0, -8.0, {})]
        events += [Event("x", kind, 7, 10.0 * i, 10.0 * i + 5, {}) for i in range(count)]
        rank = of_rank(events)
        busy = rank.compute_ms if kind == "kernel" else rank.copying_ms
        assert busy == pytest.approx(5 * count / 1e3, rel=0.01)
        assert sum(looked_at) < 20 * count  # and not by its square


@pytest.mark.parametrize("many", [2, 3, 1 << 16])
def test_merging_now_and_then_gives_what_merging_once_does(
    monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    monkeypatch.setattr(intervals, "MANY", many)
    given = [(5.0, 6.0), (1.0, 2.0), (2.0, 3.0), (5.5, 9.0), (0.0, 0.0), (8.0, 8.5), (7.0, 7.5)]
    assert intervals.merge(given) == [(1.0, 3.0), (5.0, 9.0)]
