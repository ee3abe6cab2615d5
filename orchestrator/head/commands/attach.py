"""`orchestrator attach`: follow a running job again."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from orchestrator.common.errors import UsageError
from orchestrator.common.text import plural
from orchestrator.config.launch import View, Where
from orchestrator.head.commands.follow import follow_again, head_name, show_unseen, tell_end
from orchestrator.head.screen.output import say
from orchestrator.head.status.find_job import adopt_job
from orchestrator.records.experiment import Experiment, this_head

STEAL_SECONDS = 15.0  # for the other head to leave


def attach(where: Where, wanted: str | None, view: View, *, steal: bool) -> int:
    job = adopt_job(where, wanted)
    experiment = job.experiment
    if job.record.over:
        show_unseen(experiment, job.record, view)
        return tell_end(experiment, job.record)
    code = job.backend.watch(experiment, job.record, say, tell_end)
    if code is not None:
        return code
    holder = experiment.steal(STEAL_SECONDS) if steal else experiment.lock()
    if holder is not None and holder.get("background"):
        holder, steal = experiment.steal(STEAL_SECONDS), True
    if holder is not None:
        raise followed(experiment, holder, stolen=steal)
    record = experiment.read_record()  # the head that left may have seen more of it
    if record.over:
        experiment.unlock()
        show_unseen(experiment, record, view)
        return tell_end(experiment, record)
    count = plural(len(record.nodes), "node")
    say(f"{experiment.name}: {count}; d leaves it running, Ctrl-C stops it")
    record = replace(record, head=this_head())
    return follow_again(experiment, record, job.transport, view, where=where)


def followed(experiment: Experiment, holder: dict[str, Any], *, stolen: bool) -> UsageError:
    """Make the error for a job that another process follows and does not give up."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
    still = f" and did not leave within {STEAL_SECONDS:.0f} s" if stolen else ""
    return UsageError(
        f"{experiment.name} is followed by {head_name(holder)}, since {since}{still}",
        f"end that process (kill -9 {holder['pid']} there); the job goes on"
        if stolen
        else f"take it over: orchestrator attach --steal {experiment.name}; "
        f"just watch: orchestrator logs -f {experiment.name}",
    )
