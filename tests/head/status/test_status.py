from __future__ import annotations

import dataclasses
import time

from orchestrator.head.status.status import from_record, in_order, state_of, to_text
from orchestrator.protocol.events import RankState
from orchestrator.protocol.requests.follow import JobState
from orchestrator.records.experiment import JobRecord, NodeRecord
from orchestrator.records.outcome import Verdict

NODES = [
    NodeRecord(0, "gpu1", "gpu1", None, None, "10.0.0.1", "python3", 0, 1),
    NodeRecord(1, "bob@gpu12", "gpu12", "bob", None, "10.0.0.2", "python3", 1, 2),
]
RECORD = JobRecord("job-1", "experiments/x", "running", ["master_launch"], NODES, 1000.0)


def test_a_line_for_every_node_and_rank() -> None:
    ranks = {
        10: RankState(state="exited", pid=8, code=3),
        2: RankState(state="running", pid=7),
    }
    states = [
        state_of(RECORD, NODES[0], "unreachable", "no answer"),
        state_of(RECORD, NODES[1], "running").replace(ranks=ranks),
    ]
    assert to_text(RECORD, states).splitlines() == [
        "job-1: running, 2 nodes",
        "  node 0     gpu1       unreachable  no answer",
        "  node 1     bob@gpu12  running",
        "    rank 2   pid 7      running",
        "    rank 10  pid 8      exited       exit code 3",
    ]


def test_a_job_that_failed_says_why() -> None:
    cause = Verdict(
        **{"node": 1, "node_name": "gpu12", "rank": 2, "time": 1060.0, "kind": "exception"},
        **{"message": "ValueError: \x1b[31mbad", "traceback": "", "where": "train.py:3 in main"},
        **{"title": "an exception", "fix": "mend it"},
    )
    failed = dataclasses.replace(RECORD, state="failed", ended=1061.0, verdict=cause)
    said = to_text(failed, from_record(failed)).splitlines()[-3:]
    assert said[0].startswith("  the cause: rank 2 on node 1 (gpu12), ")
    assert said[0].endswith(": ValueError: bad")
    assert said[1:] == ["    at train.py:3 in main", "  what to do: mend it"]
    for state in ("stopped", "running"):  # its attempt before failed
        assert "cause" not in to_text(dataclasses.replace(failed, state=state), from_record(failed))


def test_a_node_with_a_wrong_clock_does_not_have_the_newest_job() -> None:
    """Else `stop` without a name would ask it, and not the one that runs."""
    states = [JobState(job=str(when), node=0, state="running", ranks={}, started=when)
              for when in (9e18, 1000.0, 2000.0)]  # fmt: skip
    assert in_order(states, 2500.0)[-1].started == 2000.0
    assert in_order(states[:1], 2500.0)[-1].started == 9e18


def test_the_newest_job_is_that_of_the_last_launch() -> None:
    """A node's clock may be an hour ahead, and its job older."""
    old, new = (
        JobState(job=at, node=0, state="running", ranks={}, started=started, experiment=f"x_{at}")
        for at, started in (("20260102_100000", 9000.0), ("20260102_103000", 7200.0))
    )
    for states in ([old, new], [new, old]):
        assert in_order(states, time.time())[-1] == new


def test_a_job_that_has_no_nodes_yet() -> None:
    assert to_text(dataclasses.replace(RECORD, nodes=[]), []) == "job-1: running, 0 nodes"
