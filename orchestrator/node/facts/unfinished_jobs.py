"""Finds jobs of ours on this machine that have not ended: they run, or were given up."""

from __future__ import annotations

import os

from orchestrator.node.job import processes
from orchestrator.node.job.run_directory import RunDir, all_runs, connect
from orchestrator.protocol.events import Ended
from orchestrator.protocol.facts import Leftover

NEWEST = 64  # a machine that ran thousands of jobs must not read all of their events


def leftovers() -> tuple[Leftover, ...]:
    """Return the jobs here that have not ended, whether or not their supervisors answer."""
    runs = sorted(all_runs(), key=_changed, reverse=True)[:NEWEST]
    unfinished = [run for run in runs if os.path.exists(run.spec) and run.last(Ended) is None]
    return tuple(
        Leftover(job=run.job, node=run.node, alive=_answers(run))
        for run in processes.here(unfinished)
    )


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
