"""`orchestrator logs`: show the logs of a job, running or over."""

from __future__ import annotations

from orchestrator.common.errors import EXIT_DONE
from orchestrator.config.launch import View, Where
from orchestrator.head.commands.follow import make_screen
from orchestrator.head.screen.output import say
from orchestrator.head.status.catch_up import LogFetcher
from orchestrator.head.status.find_job import adopt_job


def logs(where: Where, wanted: str | None, view: View, *, follow: bool, last: int | None) -> int:
    job = adopt_job(where, wanted)
    record = job.backend.begun(job.experiment, job.record, say, wait=follow)
    record.check_choice(view.node, view.rank, "--{} {}")
    screen = make_screen(job.experiment, record, view)
    fetcher = LogFetcher(job.experiment, record, job.transport, job.backend)
    over = not follow
    if over or last is not None:
        fetcher.catch_up()
    else:
        fetcher.begin()
    if last is not None:
        screen.begin_near_end(last)
    while screen.pump() or not (over or screen.broken):
        over = over or fetcher.over(wait=0.2)
    screen.close()
    fetcher.end()
    return EXIT_DONE
