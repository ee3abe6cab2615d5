"""Amount and number of transfers: collectives and their elements, counted in ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.core.test_parity import accumulate, config, fsdp
from tests.engine.programs import configured as own
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow

STEPS = 2
# These are the two layers, and the rest of the model.
GROUPS = 3


@pytest.mark.parametrize(
    ("nodes", "how", "within"),
    [
        # Between nodes once per step; within them once per micro-batch, where the sums stay small.
        ([2, 2], fsdp("hybrid_shard"), 3),
        # Whole gradients wait in memory for the last micro-batch.
        ([2, 2], fsdp("hybrid_shard", accumulate="whole"), 1),
        ([2], fsdp("full_shard"), 3),
        ([2], fsdp("full_shard", accumulate="whole"), 1),
    ],
)
def test_collectives_per_step_are_minimal(
    tmp_path: Path, nodes: list[int], how: dict[str, Any], within: int
) -> None:
    """Between nodes each gradient crosses once in a step, from the rank that has its shard, and
    nothing else does."""
    changes = {
        "training": {"loss": "tests.engine.programs.configured:counting_loss", "max_steps": STEPS},
        "checkpoint": {"at_end": False},
    }
    made = config(how, accumulate(3), changes, world=sum(nodes))
    job = Job(str(tmp_path / "job"), nodes, made, env={"COUNT_INTO": str(tmp_path)})
    assert run(job) == [[0] * sum(nodes)]
    parameters = sum(parameter.numel() for parameter in own.model().parameters())
    for rank in range(sum(nodes)):
        counted = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert counted["reduce_scatter_single within a node"][0] == within * GROUPS * STEPS
        between = {name: found for name, found in counted.items() if "between" in name}
        crossed = [GROUPS * STEPS, parameters // 2 * STEPS]
        assert between == ({"all_reduce between nodes": crossed} if len(nodes) > 1 else {})
