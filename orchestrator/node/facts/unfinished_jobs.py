"""Jobs of ours that this machine still knows and that have not ended: running, or given up."""

from __future__ import annotations

import os
from typing import Any

from orchestrator.node.job.run_directory import RunDir, all_runs, connect

NEWEST = 64  # a machine that ran thousands of jobs must not read all of their events


def leftovers() -> list[dict[str, Any]]:
    """alive: its supervisor answers. One that does not has left processes, or just its files."""
    runs = sorted(all_runs(), key=_changed, reverse=True)[:NEWEST]
    return [
        {"job": run.job, "node": run.node, "alive": _answers(run)}
        for run in runs
        if os.path.exists(run.spec)
        and not any(event.get("event") == "ended" for event in run.read_events())
    ]


def _changed(run: RunDir) -> float:
    try:
        return os.stat(run.path).st_mtime
    except OSError:
        return 0.0


def _answers(run: RunDir) -> bool:
    try:
        connect(run).close()
    except OSError:
        return False
    return True
