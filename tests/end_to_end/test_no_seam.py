"""Two faults in one training; scripts/bench/no_seam.py takes as many as one likes."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.node.job.part.oom_evidence import oom_kills
from tests.clusters.netns import NetnsCluster
from tests.end_to_end.harm import Seam, head_in_the_recovery, masters_node
from tests.end_to_end.no_seam import BATCH, NoSeam, Trained, compare

RANKS, STEPS = 4, 3
WHOLE = Trained(
    {step: 1.0 / step for step in range(1, STEPS + 1)},
    {
        (step, rank): tuple(BATCH * (RANKS * (step - 1) + rank) + number for number in range(BATCH))
        for step in range(1, STEPS + 1)
        for rank in range(RANKS)
    },
    ("a", "b", "c", "d"),
)


def test_killed_rank_head_and_node_leave_no_trace(
    netns_cluster: Callable[..., NetnsCluster], tmp_path: Path
) -> None:
    """A spare takes the place of the master's node, and ranks and supervisors meet there."""
    before = oom_kills()
    faults = [("head killed", head_in_the_recovery), ("master's node cut off", masters_node)]
    one = NoSeam(netns_cluster(3), tmp_path, 1, faults)
    one.run()
    first, second, spare = one.cluster.addresses
    broken, record = one.head.experiment, one.head.record
    attempts = record["attempts"]
    # A head that is killed while it starts an attempt may cost one more.
    states = [attempt["state"] for attempt in attempts]
    assert (states[0], states[-1]) == ("failed", "done") and states.count("lost") == 1
    # The kernel counts for the whole machine what it killed for memory, as beside another test.
    kind = "signal" if oom_kills() == before else "out_of_memory"
    assert attempts[0]["verdict"]["kind"] in ("signal", kind) and attempts[0]["step"] > 0
    assert record["master"].startswith(f"{spare}:")
    assert [node["name"] for node in record["nodes"]] == [spare, second]
    assert [node["name"] for node in record["spares"]] == [first]
    said = "".join(path.read_text() for path in (broken / "logs").glob("node_0_*.txt"))
    assert len(re.findall(r"resuming after step \d+, from memory", said)) >= 2, said
    resume_dirs = ["sh", "-c", "ls -d /dev/shm/orchestrator-*/* 2>/dev/null || true"]
    assert one.head.nothing_left() and not one.cluster.exec(1, resume_dirs)
    assert not any(one.cluster.processes(host, "ORCHESTRATOR_ROOM=") for host in (1, 2))


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (replace(WHOLE, losses={**WHOLE.losses, 2: 0.5 + 1e-12}), "from step 2 on"),
        (replace(WHOLE, losses={1: 1.0, 2: 0.5}), "2 of 3 steps"),
        (replace(WHOLE, samples={**WHOLE.samples, (3, 1): (0, 1)}), "not seen once"),
        (replace(WHOLE, weights=("a", "b", "c", "e")), "weights"),
    ],
)
def test_compare_detects_every_trace(broken: Trained, what: str) -> None:
    compare(WHOLE, WHOLE, STEPS)
    with pytest.raises(Seam, match=what):
        compare(broken, WHOLE, STEPS)
