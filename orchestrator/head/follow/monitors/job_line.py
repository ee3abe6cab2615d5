"""The status line of a followed job: its progress, or the step of the start it waits for."""

from __future__ import annotations

import time

from orchestrator.common.text import format_duration
from orchestrator.head.follow.followed_job import FollowedJob
from orchestrator.head.follow.job_end import Outcome
from orchestrator.head.screen import styles
from orchestrator.head.screen.keyboard import in_foreground
from orchestrator.head.screen.progress import join_parts, stall_notice
from orchestrator.records.metrics import progress

# The pause between two reads of the metrics; at least twenty times the duration of a read.
LOOK_SECONDS = 1.0
# The weights of the parts of the progress, by their first word; that of any other is 3.
WEIGHTS = {"step": 0, "loss": 2}

# A text, its style, and its weight; the heaviest part is left out first.
Part = tuple[str, str, int]


class JobLine:
    """Returns the status line of one attempt for a given terminal width."""

    def __init__(self, job: FollowedJob) -> None:
        self.job = job
        self.began = time.monotonic()
        self.experiment = job.experiment.path
        self.known, self.stall = progress.Progress(), ""
        self.next = 0.0
        self.keys = "d detach" if in_foreground() else ""

    def __call__(self, columns: int) -> str:
        now = time.monotonic()
        if now >= self.next:
            self.known, _ = progress.read_progress(self.experiment, self.job.record)
            self.stall = stall_notice(self.experiment)
            self.next = now + max(LOOK_SECONDS, 20 * (time.monotonic() - now))
        return join_parts([*self.nodes(), *self.state(now - self.began), *self.rest()], columns)

    def nodes(self) -> list[Part]:
        nodes = self.job.nodes
        here = sum(not (node.lost_since or node.given_up) for node in nodes)
        style = styles.DONE if here == len(nodes) else styles.WARNING
        return [(f"{here}/{len(nodes)} nodes", style, 1)] if len(nodes) > 1 else []

    def state(self, seconds: float) -> list[Part]:
        """Return the parts on the job's progress, its end, or the step of its start."""
        nodes, end = self.job.nodes, self.job.end
        if not end.open:
            over = sum(node.over for node in nodes)
            how = "saving and stopping" if end.outcome is Outcome.STOPPED else "ending"
            return [(f"{how}, {over}/{len(nodes)} nodes have ended", styles.WARNING, 0)]
        parts = progress.progress_texts(self.known)
        if parts:
            lost = styles.FAILED if self.known.lost else ""
            kinds = ((part, part.split(" ")[0]) for part in parts)
            return [
                *(
                    (part, lost if kind == "loss" else "", WEIGHTS.get(kind, 3))
                    for part, kind in kinds
                ),
                (self.stall, styles.WARNING, 1),
            ]
        return [(f"{self.phase()} {format_duration(max(1, round(seconds)))}", "", 0)]

    def phase(self) -> str:
        nodes = self.job.nodes
        begun = sum("supervisor" in node.times for node in nodes)
        if begun < len(nodes):
            return f"starting {begun}/{len(nodes)}"
        launch = self.job.record.launch
        torchrun_forks = launch.start != "plain" and not launch.no_torchrun
        if torchrun_forks and not all("torch" in node.times for node in nodes):
            return "importing torch"
        if not all("ranks" in node.times for node in nodes):
            return "ranks meet"
        return "running"

    def rest(self) -> list[Part]:
        record = self.job.record
        most = 1 + record.launch.max_restarts
        again = styles.WARNING if record.attempt > 1 else ""
        attempt = f"attempt {record.attempt}/{most}" if most > 1 else ""
        slow = self.known.slowest and f"slowest: {self.known.slowest}"
        return [(slow, styles.WARNING, 4), (attempt, again, 5), (self.keys, styles.DIM, 6)]
