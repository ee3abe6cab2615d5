"""When a GPU that holds the others up is named."""

from __future__ import annotations

import json
from pathlib import Path

from orchestrator.head.follow.monitors.slow_monitor import SlowMonitor
from orchestrator.records.experiment import NodeRecord
from orchestrator.records.outcome import SlowRank

NODES = [NodeRecord(n, f"gpu0{n}", f"gpu0{n}", None, None, "", "", n, 1) for n in range(2)]


def test_a_gpu_is_named_once_after_two_looks_at_samples_that_go_on(tmp_path: Path) -> None:
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
    monitor.check()
    assert not monitor.last  # the beginning of a job is left alone
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
