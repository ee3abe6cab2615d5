"""Tells how one job stands on this node, from its files and its processes."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from orchestrator.node.job import job_processes
from orchestrator.node.job.run_directory import RunDir, connect
from orchestrator.protocol.events import Ended, RankEvent, RankState, Started
from orchestrator.protocol.requests.follow import JobState


def job_state(run: RunDir) -> JobState:
    """Return what `status` shows of one job on this node."""
    known: dict[str, Any] = {"state": "lost"}
    ranks: dict[int, RankState] = {}
    ended = False
    for event in run.read_events():
        if isinstance(event, Started):
            known["started"] = event.time
        elif isinstance(event, Ended):
            ended = True
            known.update(ended=event.time, agent=event.agent, why=event.why)
        elif isinstance(event, RankEvent):
            ranks[event.rank] = ranks.get(event.rank, RankState()).after(event)
    try:
        spec = run.read_spec()
        known.update(nproc=spec.nproc, first_rank=spec.first_rank, nnodes=spec.nnodes)
        known.update(experiment=spec.experiment)
        status = os.stat(run.log)
        known.update(log_bytes=status.st_size, log_time=status.st_mtime)
    except (OSError, ValueError):
        pass  # half written when the disk was full
    with contextlib.suppress(OSError):
        connect(run).close()
        known["state"] = "running"
    if ended:
        known["state"] = "ended"
    else:
        living = job_processes.of_job(run.job, run.node)
        known["processes"] = tuple(process.pid for process in living)
    return JobState(job=run.job, node=run.node, ranks=ranks, **known)
