"""The GPU that slows the others, found in the samples that nodes send."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from orchestrator.head.follow.monitors.slow_gpus import SlowGpu, SlowMonitor, slow_gpu
from orchestrator.records.experiment import NodeRecord
from orchestrator.records.metrics.samples import Sample, read_last_samples
from orchestrator.records.outcome import SlowRank
from tests.head.follow.conftest import Follow

Values = Sequence[float | None]


def samples(path: Path, use: Callable[[int], Values], mhz: Values) -> list[Sample]:
    """Twelve samples of a node as its sampler writes them."""
    lines = [
        {"time": 1000.0 + 5 * n, "node": 0, "cpu": 0.1, "gpu": {"use": use(n), "mhz": mhz}}
        for n in range(12)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_last_samples(path, 12)


def found(
    path: Path,
    first: Callable[[int], Values],
    second: Callable[[int], Values],
    clocks: tuple[Values, Values] = ((1900, 1900), (1900, 1900)),
    models: tuple[str, str] = ("H100", "H100"),
) -> SlowGpu | None:
    nodes = {0: samples(path, first, clocks[0]), 3: samples(path, second, clocks[1])}
    return slow_gpu(
        nodes, {node: (model, model) for node, model in zip((0, 3), models, strict=True)}
    )


def busy(_: int) -> Values:
    return [1.0, 0.97]


def test_slow_gpu_names_idle_gpu_that_delays_others(tmp_path: Path) -> None:
    slow = found(tmp_path / "x", busy, lambda n: [0.98, 0.55 + n % 3 / 10])
    assert slow is not None and (slow.node, slow.gpu, slow.cause) == (3, 1, "slow input")
    assert slow.text.startswith("is busy 65% of the time, the others 98%: they wait for it")


def test_slow_gpu_names_gpu_with_lower_clock(tmp_path: Path) -> None:
    one = found(tmp_path / "x", busy, busy, ((1900, 1890), (1320, 1905)))
    assert one == SlowGpu(3, 0, "slow compute", "runs at 1320 MHz, the others at 1895 MHz")
    hot = found(tmp_path / "x", busy, busy, ((1900, 1890), (1300, 1320)))
    assert hot is not None and (hot.node, hot.gpu) == (3, 0)


@pytest.mark.parametrize(
    ("first", "second", "clocks", "models"),
    [
        (busy, busy, ((1900, 1900), (1800, 1850)), ("H100", "H100")),
        (busy, busy, ((1900, 1900), (1400, 1400)), ("H100", "A100")),  # another model's clock
        (busy, lambda n: [0.6, 0.6], ((1900, 1900), (1900, 1900)), ("H100", "H100")),
        (lambda n: [0.5, 0.6], lambda n: [0.6, 0.2], ((1900,) * 2, (900,) * 2), ("H100", "H100")),
        (busy, lambda n: [0.98, 0.3 if n % 2 else 1.0], ((1,) * 2, (1,) * 2), ("H100", "H100")),
        (busy, lambda n: [0.98, None], ((None,) * 2, (None,) * 2), ("H100", "H100")),
        (lambda n: [], lambda n: [0.98], ((), (900,)), ("H100", "H100")),
    ],
)
def test_slow_gpu_names_none_without_clear_outlier(
    first: Callable[[int], Values],
    second: Callable[[int], Values],
    clocks: tuple[Values, Values],
    models: tuple[str, str],
    tmp_path: Path,
) -> None:
    assert found(tmp_path / "x", first, second, clocks, models) is None
    assert slow_gpu({}, {}) is None


NODES = [NodeRecord(n, f"gpu0{n}", f"gpu0{n}", None, None, "", "", n, 1) for n in range(2)]


def test_monitor_names_gpu_once_after_two_looks(tmp_path: Path, follow: Follow) -> None:
    found: list[SlowRank] = []
    monitor = SlowMonitor(NODES, tmp_path, found.append)

    def sampled(seconds: range) -> None:
        for node, use in ((0, 1.0), (1, 0.6)):
            with (tmp_path / f"node_0{node}_metrics.jsonl").open("a") as file:
                for second in seconds:
                    line = {"time": float(second), "gpu": {"use": [use], "mhz": [1900]}}
                    file.write(json.dumps(line) + "\n")

    def look() -> int:
        monitor.due_at = 0.0
        monitor.check()
        return len(found)

    for node in (0, 1):
        about = {"host": f"gpu0{node}", "gpus": ["H100"]}
        line = {"time": 1.0, "node": 0, "about": about, "gpus": ["H100"]}
        (tmp_path / f"node_0{node}_metrics.jsonl").write_text(json.dumps(line) + "\n")
    sampled(range(5, 60, 5))
    monitors = follow().monitors
    monitors.check()
    # The beginning of a job is ignored.
    assert "slow" not in vars(monitors)
    assert look() == 0
    sampled(range(60, 120, 5))
    assert look() == 1
    (slow,) = found
    assert (slow.node, slow.rank, slow.cause) == (1, 1, "slow input")
    assert slow.text.startswith("GPU 0 of node 1 (gpu01) is busy 60% of the time")
    sampled(range(120, 180, 5))
    assert look() == 1
    monitor.named.clear()
    assert look() == look() == 1  # nothing new is known of them
