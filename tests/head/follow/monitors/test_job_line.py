"""The status line of a job, from its start to its end."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

from orchestrator.config.launch import Launch
from orchestrator.head.follow.job_end import Outcome
from orchestrator.head.follow.monitors.job_line import JobLine
from orchestrator.head.screen.lines import clean_line
from orchestrator.records.metrics.trainers import file_name
from tests.head.follow.test_followed_job import followed


def test_job_line_shows_start_then_progress(tmp_path: Path) -> None:
    job = followed(tmp_path)
    launch = Launch(start="fork", max_restarts=3)
    job.record = replace(job.record, state="running", engine=False, launch=launch)
    line = JobLine(job)
    line.keys = "d detach"

    def said(columns: int = 100) -> str:
        line.next = 0.0
        return clean_line(line(columns))

    waits = []
    for name in ("supervisor", "torch", "ranks"):
        waits.append(said())
        for node in job.nodes:
            node.times[name] = 1.0
    assert [text.split(" · ")[1] for text in waits] == [
        "starting 0/2 1 s",
        "importing torch 1 s",
        "ranks meet 1 s",
    ]
    assert said() == "2/2 nodes · running 1 s · attempt 1/4 · d detach"
    outputs = tmp_path / "run_1" / "outputs"
    outputs.mkdir(parents=True)
    step = {"step": 214, "steps": 1740, "loss": 0.016, "tokens_per_s": 1300, "left_s": 457.8}
    (outputs / file_name(0)).write_text(json.dumps(step) + "\n")
    job.nodes[1].lost_since = 1.0
    how_far = "step 214/1740 · loss 0.016 · 1.3 k/s · 7 min 38 s left"
    assert said() == f"1/2 nodes · {how_far} · attempt 1/4 · d detach"
    assert said(30) == "1/2 nodes · step 214/1740"
    since = time.time() - 45
    os.utime(outputs / file_name(0), (since, since))
    assert f"{how_far} · no step for 4" in said()
    assert said(45).startswith("1/2 nodes · step 214/1740 · no step for 4")
    job.end.outcome, job.nodes[0].over = Outcome.STOPPED, True
    assert "saving and stopping, 1/2 nodes have ended" in said()
