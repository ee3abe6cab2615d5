"""Failures that count in a machine's history, and the message if it cannot be kept."""

import io
from pathlib import Path
from typing import Any

import pytest

from orchestrator.head.follow.conclusion import cause_of
from orchestrator.head.follow.followed_job import FollowedJob
from orchestrator.head.follow.reports import Reports
from orchestrator.head.follow.streams.updates import Happened
from orchestrator.head.follow.verdict import Failure
from orchestrator.head.screen.screen import Display, Screen
from orchestrator.protocol.events import Ended, event_from_data
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord

NODES = [
    NodeRecord(index, f"bob@{host}", host, "bob", port, "10.0.0.1", "python3", index, 1)
    for index, (host, port) in enumerate([("gpu01", None), ("gpu02", 2222)])
]
ENDED = Ended(time=1002.0, agent=0, why="", killed={}, left=(), ranks={})
RECORD = JobRecord("run-1", "run", "failed", ["master_launch"], NODES, 1000.0)


def followed(path: Path) -> FollowedJob:
    screen = Screen([], io.StringIO(), tty=False, color=False, quiet=True)
    return FollowedJob(Experiment(path / "run_1"), RECORD, Display(screen))


@pytest.mark.parametrize("asked", ["", "rank 0 failed"])
@pytest.mark.parametrize("how", [{"event": "rank_finished"}, {"event": "rank_ended", "code": 0}])
def test_early_exit_is_cause_of_later_failures(
    how: dict[str, Any], asked: str, tmp_path: Path
) -> None:
    """However late its end is seen; who left because it was asked to is the cause of nothing."""
    job = followed(tmp_path)
    broken = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4"
    job.failures.append(Failure(0, "a", 0, 1001.0, "communication", broken))
    left = {"time": 1004.0, "rank": 1, "local": 0, "pid": 7, "asked": asked, **how}
    if how["event"] == "rank_finished":
        del left["pid"]
    Reports(job).handle(Happened(1, event_from_data(left)))
    cause = cause_of(job)
    assert cause is not None
    assert (cause.kind, cause.node) == (("link", 0) if asked else ("ended_early", 1))


@pytest.mark.parametrize(
    ("still", "reached", "named"),
    [
        # Node 1 has missed the heartbeat and ended its part.
        ((40.0, 0.2), True, 0),
        ((0.2, 40.0), True, 1),
        # This is too short for a loss, as node_loss_timeout is 60 s.
        ((20.0, 0.2), True, 1),
        ((40.0, 30.0), True, 0),
        # Node 1 is unreachable from every other node.
        ((40.0, 0.2), False, 1),
    ],
)
def test_stalled_supervisor_is_cause_of_silence(
    still: tuple[float, float],
    reached: bool,
    named: int,
    tmp_path: Path,
) -> None:
    """A node that hears nothing of node 0 can only say so of itself."""
    job = followed(tmp_path)
    what = "no word between node 1 and node 0 for 60 s"
    job.failures.append(job.nodes[1].failure(1001.0, "lost", what))
    for node, seconds in zip(job.nodes, still, strict=True):
        node.ended, node.over = ENDED.replace(stood_still=seconds), True
    job.nodes[1].over = reached
    cause = cause_of(job)
    assert cause is not None and cause.kind == "lost" and cause.node == named
    assert cause.node_name == NODES[named].name
    assert "no word between node 1 and node 0" in cause.message
    if max(still) > 30 and reached:
        assert cause.message.startswith("its supervisor did not run for 40 s: ")


def test_slow_rank_is_recorded_once(tmp_path: Path) -> None:
    job = followed(tmp_path)
    event = {
        "event": "rank_slow", "time": 2000.0, "rank": 1, "local": 0, "cause": "disk", "who": 1,
        "node": 1, "step": 0, "text": "node 1: its disk is slow",
    }  # fmt: skip
    for _ in range(2):
        Reports(job).handle(Happened(1, event_from_data(event)))
    assert [(slow.cause, slow.step, slow.time) for slow in job.record.slow] == [
        ("disk", None, 2000.0)
    ]
