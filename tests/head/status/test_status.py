import dataclasses
import json
import re
from pathlib import Path

from orchestrator.head.status.status import from_record, start_times, state_of, to_text
from orchestrator.protocol.events import RankState
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord
from orchestrator.records.outcome import JobVerdict

NODES = [
    NodeRecord(0, "gpu1", "gpu1", None, None, "10.0.0.1", "python3", 0, 1),
    NodeRecord(1, "bob@gpu12", "gpu12", "bob", None, "10.0.0.2", "python3", 1, 2),
]
RECORD = JobRecord(
    "job-1", "/moved/from/y", "running", ["/bin/master_launch", "train.py", "a b"], NODES, 1000.0
)
EXPERIMENT = Experiment(Path("experiments/x"))


def test_to_text_has_line_per_node_and_rank() -> None:
    ranks = {
        10: RankState(state="exited", pid=8, code=3),
        2: RankState(state="running", pid=7),
        **{rank: RankState(state="running", pid=rank) for rank in range(3, 8)},
        11: RankState(state="exited", pid=9, code=3),
    }
    states = [
        state_of(RECORD, NODES[0], "unreachable", "no answer"),
        state_of(RECORD, NODES[1], "running").replace(ranks=ranks),
    ]
    heading, how_far, typed, *lines = to_text(EXPERIMENT, RECORD, states).splitlines()
    assert heading == "job-1: running, 2 nodes"
    assert re.fullmatch(r"  for \d+ d \d\d h · started 19\d\d-\d\d-\d\d [0-9:]{8}", how_far)
    assert typed == "  master_launch train.py 'a b'"
    assert lines == [
        "  node 0         gpu1               unreachable  no answer",
        "  node 1         bob@gpu12          running",
        "    ranks 2-7    pids 7, 3, 4, ...  running",
        "    ranks 10-11  pids 8, 9          exited       exit code 3",
    ]


def test_to_text_shows_cause_of_failed_job() -> None:
    cause = JobVerdict(
        **{"node": 1, "node_name": "gpu12", "rank": 2, "time": 1060.0, "kind": "exception"},
        **{"message": "ValueError: \x1b[31mbad", "traceback": "", "where": "train.py:3 in main"},
        **{"title": "an exception", "fix": "mend it"},
    )
    failed = dataclasses.replace(RECORD, state="failed", ended=1061.0, verdict=cause)
    said = to_text(EXPERIMENT, failed, from_record(failed)).splitlines()[-4:]
    assert said[0].startswith("  the cause: rank 2 on node 1 (gpu12), ")
    assert said[0].endswith(": ValueError: bad")
    full = "    full log: orchestrator logs x --rank 2"
    assert said[1:] == ["    at train.py:3 in main", full, "  what to do: mend it"]
    # The previous attempt failed.
    for state in ("stopped", "running"):
        other = dataclasses.replace(failed, state=state)
        assert "cause" not in to_text(EXPERIMENT, other, from_record(failed))


def test_to_text_accepts_job_without_nodes() -> None:
    assert to_text(EXPERIMENT, dataclasses.replace(RECORD, nodes=[]), []).startswith(
        "job-1: running, 0 nodes\n"
    )


def test_start_times_are_shown_once_ranks_run(tmp_path: Path) -> None:
    times = {"begin": 10, "reached": 10.5, "synced": 10.75, "planned": 11, "checked": 11.5}
    (tmp_path / "manifest.json").write_text(json.dumps({"timeline": times}))
    nodes = [dataclasses.replace(node, times={"ranks": 12.0 + node.index}) for node in NODES]
    started = dataclasses.replace(RECORD, nodes=nodes)
    steps = "  start: connect 0.50 s, code 0.25 s, plan 0.25 s, check 0.50 s, ranks 1.50 s"
    assert steps in to_text(Experiment(tmp_path), started, from_record(started)).splitlines()
    for experiment, record in (
        (Experiment(tmp_path), RECORD),
        (Experiment(tmp_path), dataclasses.replace(started, attempt=2)),
        (Experiment(tmp_path / "none"), started),
    ):
        assert start_times(experiment, record) == {}
