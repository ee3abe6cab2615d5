"""`orchestrator status`: ask the nodes what runs where; with --watch live, on a terminal."""

from __future__ import annotations

import time

from orchestrator.common.errors import EXIT_DONE, EXIT_NODE
from orchestrator.common.wings import installed, view
from orchestrator.config.launch import Where
from orchestrator.head.screen import output
from orchestrator.head.screen.output import clear, write_out
from orchestrator.head.status import status as job_status
from orchestrator.head.status.find_job import find_job


def status(where: Where, wanted: str | None, *, watch: bool) -> int:
    job = find_job(where, wanted)
    running = job.record.state == "running"
    if watch and not output.as_json() and running and installed("textual"):
        top = view("top")
        if top.can_be_live():
            top.of_job(where, job)
            job, watch = job.refreshed(), False
    while True:
        record = job.record
        asleep = record.over or record.state == "queued"
        states = (
            job_status.from_record(record)
            if asleep
            else job_status.ask_nodes(job.transport, record)
        )
        if watch:
            clear()
        scheduled = job.backend.scheduled(record)
        show = job_status.to_json if output.as_json() else job_status.to_text
        write_out(show(record, states, scheduled))
        over = record.over or (
            record.state != "queued" and all(state.state == "ended" for state in states)
        )
        if over or not watch:
            unreachable = any(state.state == "unreachable" for state in states)
            return EXIT_NODE if unreachable else EXIT_DONE
        time.sleep(1)
        job = job.refreshed()
