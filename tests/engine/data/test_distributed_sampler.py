"""torch's own DistributedSampler: our sampler takes its place, so any ranks share its epoch."""

import json
from pathlib import Path

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from orchestrator.engine.core.settings import VARIABLE
from orchestrator.engine.data.sharded_loader import MapShard
from tests.engine.data.test_loaders import ranks
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_sampler_yields_each_sample_once(shuffle: bool, batched: bool) -> None:
    many, world, seen, order = 22, 3, list[int](), list[int]()
    for own in ranks(world):
        sampler = DistributedSampler(range(many), world, own.rank, shuffle)  # type: ignore[arg-type, var-annotated]
        around = BatchSampler(sampler, 2, False)
        loader = DataLoader(  # type: ignore[var-annotated]
            range(many),  # type: ignore[arg-type]
            **({"batch_sampler": around} if batched else {"batch_size": 2, "sampler": sampler}),
        )
        for micro in MapShard(loader, own, 3).epoch(2):
            seen += [int(x) for x in micro.data] if micro.real else []
            order += micro.data.tolist()[:1] if own.rank == 0 else []
    assert sorted(seen) == list(range(many))
    assert (order == sorted(order)) == (not shuffle)


@pytest.mark.parametrize("kind", ["DistributedSampler", "Mine"])
def test_sampler_continues_from_three_ranks_on_two(tmp_path: Path, kind: str) -> None:
    """A user's script with a sampler of its own, interrupted and started on fewer ranks."""
    call, common = "tests.engine.programs.trainings:own_sampler", {VARIABLE: "3", "SAMPLER": kind}
    one = Job(str(tmp_path), [3], {}, {**common, "UNTIL": "1 steps"}, call=call)
    two = Job(str(tmp_path), [2], {}, {**common, "ORCHESTRATOR_ATTEMPT": "2"}, call=call)
    assert run(one) == [[0] * 3], one.output()
    codes = run(two)
    if kind == "Mine":
        assert codes == [[1] * 2]
        assert "within epoch 0, whose samples were drawn by Mine on 3 ranks" in two.output()
        assert "is not known to Mine on 2 ranks" in two.output()
        assert "leave the order to the Trainer" in two.output()
        return
    assert codes == [[0] * 2], two.output()
    assert "resuming after step 1" in two.output()
    times = json.loads((tmp_path / "times").read_text())
    assert times == pytest.approx([1.0] * 22)
