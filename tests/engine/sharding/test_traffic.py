"""Amount and number of transfers: collectives counted in ranks, bytes read from interfaces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.netns import NetnsCluster
from tests.engine.core.test_parity import accumulate, config, fsdp
from tests.engine.worlds import Job, run
from tests.launching import Head

pytestmark = pytest.mark.cluster

STEPS = 4
# These are the two layers, and the rest of the model.
GROUPS = 3


@pytest.mark.parametrize(
    ("nodes", "how", "expected"),
    [
        # Between nodes once per step; within them once per micro-batch, where the sums stay small.
        ([2, 2], fsdp("hybrid_shard"), {"all_reduce": 1, "reduce_scatter_single": 3}),
        # Whole gradients wait in memory for the last micro-batch.
        ([2, 2], fsdp("hybrid_shard", accumulate="whole"),
         {"all_reduce": 1, "reduce_scatter_single": 1}),
        ([2], fsdp("full_shard"), {"reduce_scatter_single": 3}),
        ([2], fsdp("full_shard", accumulate="whole"), {"reduce_scatter_single": 1}),
    ],
)  # fmt: skip
def test_collectives_per_step_of_three_micro_batches(
    tmp_path: Path, nodes: list[int], how: dict[str, Any], expected: dict[str, int]
) -> None:
    changes = {
        "training": {"loss": "tests.engine.programs.configured:counting_loss", "max_steps": STEPS},
        "checkpoint": {"at_end": False},
    }
    made = config(how, accumulate(3), changes, world=sum(nodes))
    job = Job(str(tmp_path / "job"), nodes, made, env={"COUNT_INTO": str(tmp_path)})
    assert run(job) == [[0] * sum(nodes)]
    for rank in range(sum(nodes)):
        counted = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        found = {
            name: counted.get(f"{name} among 2", 0)
            for name in ("all_reduce", "reduce_scatter_single")
        }
        assert found == {name: expected.get(name, 0) * GROUPS * STEPS for name in found}, counted


def sent(cluster: NetnsCluster, node: int) -> int:
    """Bytes that left a node by its one wire."""
    words = "cat /sys/class/net/[!l]*/statistics/tx_bytes"
    return sum(int(line) for line in cluster.exec(node, ["sh", "-c", words]).split())


def test_bytes_between_nodes_are_those_of_the_theory(netns_cluster: Any, tmp_path: Path) -> None:
    """Two nodes of two ranks, four micro-batches. Per step and direction, the gradients of every
    parameter cross once: 4 bytes each (a ring of two sends each half twice in halves)."""
    head = Head(netns_cluster(2), tmp_path)
    shape = ["--nproc", "2", "--set", "model.model_dim=256", "--set", "checkpoint.at_end=false"]
    shape += ["--set", "training.gradient_accumulation=4", "--set", "training.batch_size=1"]
    totals = {}
    for steps in (2, 12):
        before = [sent(head.cluster, node) for node in range(2)]
        command = head.run(*shape, "--set", f"training.max_steps={steps}")
        totals[steps] = [sent(head.cluster, n) - before[n] for n in range(2)]
    (line,) = [line for line in command.lines if line.endswith(" parameters")]
    parameters = int(line.split("| ")[1].split(" parameters")[0].replace(",", ""))
    for node in range(2):
        per_step = (totals[12][node] - totals[2][node]) / 10
        assert 0.98 < per_step / (4 * parameters) < 1.05
