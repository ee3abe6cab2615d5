"""torch's own DistributedSampler: as it is on the ranks that began, and no seam on others."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from orchestrator.engine.core.settings import VARIABLE
from orchestrator.engine.data.sharded_loader import MapShard, Parts, knows_ranks
from tests.engine.data.test_loaders import ranks
from tests.engine.worlds import Job, run
from tests.gears import examples

EPOCH = 2


def sampler(many: int, world: int, rank: int, shuffle: bool, drops: bool) -> DistributedSampler:  # type: ignore[type-arg]
    return DistributedSampler(range(many), world, rank, shuffle, seed=5, drop_last=drops)  # type: ignore[arg-type]


def as_torch_has_it(many: int, world: int, shuffle: bool, drops: bool) -> list[list[int]]:
    parts = [sampler(many, world, rank, shuffle, drops) for rank in range(world)]
    for own in parts:
        own.set_epoch(EPOCH)
    return [list(own) for own in parts]


def shards(
    many: int, size: int, world: int, first: int, shuffle: bool, drops: bool, cuts: bool
) -> list[MapShard]:
    made = []
    for own in ranks(world):
        drawn = sampler(many, world, own.rank, shuffle, drops)
        loader = DataLoader(range(many), size, sampler=drawn, drop_last=cuts)  # type: ignore[arg-type, var-annotated]
        made.append(MapShard(loader, own, 3, first, Parts(drawn, first)))
    return made


@settings(max_examples=examples(60), deadline=None)
@given(some.integers(9, 40), some.integers(1, 3), some.integers(1, 4), some.booleans(),
       some.booleans(), some.booleans())  # fmt: skip
def test_on_the_ranks_that_began_it_is_torchs_own(
    many: int, size: int, world: int, shuffle: bool, drops: bool, cuts: bool
) -> None:
    if cuts and many < (size + 1) * world:
        return
    expected = as_torch_has_it(many, world, shuffle, drops)
    for shard, own in zip(
        shards(many, size, world, world, shuffle, drops, cuts), expected, strict=True
    ):
        batches = [own[at : at + size] for at in range(0, len(own), size)]
        batches = [batch for batch in batches if len(batch) == size or not cuts]
        micros = list(shard.epoch(EPOCH))
        assert [micro.data.tolist() for micro in micros] == batches
        assert all(micro.real for micro in micros)


@settings(max_examples=examples(60), deadline=None)
@given(
    *(some.integers(1, 60), some.integers(1, 3), some.sampled_from([(4, 3, 4), (2, 3), (3, 1, 2)])),
    *(some.lists(some.integers(0, 3), min_size=2, max_size=2),),
    *(some.booleans(), some.booleans(), some.booleans()),
)
def test_other_ranks_go_on_in_the_midst_of_an_epoch(
    many: int, size: int, worlds: tuple[int, ...], rounds: list[int], shuffle: bool, drops: bool,
    cuts: bool,
) -> None:  # fmt: skip
    """To the sample: what torch's samplers show in the epoch, each as often, and nothing else."""
    parts = as_torch_has_it(many, worlds[0], shuffle, drops) if many >= worlds[0] else []
    order = [sample for turn in zip(*parts, strict=True) for sample in turn]
    if len(order) < size * max(worlds):
        return  # there is not one batch for each rank
    position, dealt = 0, list[int]()
    for world, most in itertools.zip_longest(worlds, rounds[: len(worlds) - 1]):
        own = shards(many, size, world, worlds[0], shuffle, drops, cuts)
        drawn = [list(itertools.islice(shard.epoch(EPOCH, position), most)) for shard in own]
        assert len({len(micros) for micros in drawn}) == 1
        together = [int(x) for micros in drawn for m in micros if m.real for x in m.data]
        assert Counter(together) == Counter(order[position : position + len(together)])
        dealt += together
        position += len(drawn[0]) * own[0].round_size
        if position >= len(order):
            break
    assert Counter(dealt) == Counter(order[: len(dealt)])
    left = len(order) - len(dealt)
    assert left == 0 if not cuts else left < size * (worlds[0] + max(worlds))


def test_a_batch_sampler_of_torchs_around_it_is_seen(tmp_path: Path) -> None:
    inner = sampler(12, 2, 0, True, False)
    loader = DataLoader(range(12), batch_sampler=BatchSampler(inner, 3, False))  # type: ignore[arg-type, var-annotated]
    assert knows_ranks(loader) is inner


@pytest.mark.parametrize("kind", ["DistributedSampler", "Mine"])
def test_three_ranks_then_two(tmp_path: Path, kind: str) -> None:
    """A user's script with a sampler of its own, interrupted and started on fewer ranks."""
    call, common = "tests.engine.programs.trainings:own_sampler", {VARIABLE: "3", "SAMPLER": kind}
    one = Job(str(tmp_path), [3], {}, {**common, "UNTIL": "1 steps"}, call=call)
    two = Job(str(tmp_path), [2], {}, {**common, "ORCHESTRATOR_ATTEMPT": "2"}, call=call)
    assert run(one) == [[0] * 3], one.output()
    codes = run(two)
    if kind == "Mine":
        assert codes == [[1] * 2]
        assert "after 6 samples of epoch 0" in two.output()
        assert "only your Mine knows what is left" in two.output()
        assert "torch's own DistributedSampler, or none" in two.output()
        return
    assert codes == [[0] * 2], two.output()
    assert "resuming after step 1" in two.output()
    times = json.loads((tmp_path / "times").read_text())
    assert sorted(map(round, times)) == [1] * 20 + [2] * 2  # 24, as three ranks had shown
    assert times == pytest.approx([round(each) for each in times])
