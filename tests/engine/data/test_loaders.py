"""The loaders that people really write, on one rank and on two."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.utils.data import DataLoader, Sampler

from orchestrator.engine.data.sharded_loader import MapShard
from orchestrator.engine.ranks.ranks import Ranks
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow

# These are each number once, and their mean.
TWELVE = [*map(float, range(12)), 5.5]
LIKE_TUPLES = ("namedtuples", "dataclasses", "graphs", "encodings", "sums of graphs")


@pytest.mark.parametrize("nodes", [[1], [2]])
def test_common_loaders_train_and_invalid_ones_are_refused(
    tmp_path: Path, nodes: list[int]
) -> None:
    job = Job(str(tmp_path / "job"), nodes, {}, call="tests.engine.programs.habits:loaders")
    (codes,) = run(job)
    assert codes == [0] * sum(nodes), job.output()
    for rank in range(sum(nodes)):
        results: dict[str, Any] = json.loads((job.path / f"results_{rank}").read_text())
        for name in LIKE_TUPLES:
            assert results[name] == pytest.approx(results["tuples"]), name
        for name in ("tuples", "strings", "packed", "NaN in a stream"):
            assert isinstance(results[name], float), (name, results[name])
        for name in ("weighted", "weighted stream"):
            assert results[name][0] == pytest.approx(results[name][1]), name
        assert results["batch sampler"] == results["parts"] == results["own parts"] == TWELVE
        assert results["endless"] == 9 * sum(nodes) + 1
        assert results["persistent"] is results["generator"] is True
        alone = sum(nodes) == 1
        if alone:
            assert results["no length"] == [0.0, 1.0, 2.0, 3.0, 4.0, 2.0]
        for name, words in {
            "hidden parts": "dealing out those of rank 0 would lose the rest" * (not alone),
            "named loss": "has a metric named 'loss', which is taken",
            "other names": "give the same metrics everywhere" * (not alone),
            "spent": "val_loader is a list_iterator, which gives its batches only once",
            "spent training": "train_loader is a generator",
            "empty": "there is not one batch to train or evaluate with",
        }.items():
            assert words in str(results[name]), (name, results[name])
        assert results["out of order"][-1] == pytest.approx(6.0)


def ranks(world: int) -> list[Ranks]:
    return [
        Ranks(at, world, at, torch.device("cpu"), ((0, "here"),) * world) for at in range(world)
    ]


@settings(max_examples=30, deadline=None)
@given(
    some.integers(1, 4), some.integers(1, 5), some.integers(0, 30), some.booleans(), some.booleans()
)
def test_epoch_continues_on_other_ranks_from_any_position(
    size: int, world: int, position: int, shuffle: bool, drops: bool
) -> None:
    """The rest of an epoch has each remaining sample once, from any position and world size."""
    many = 29
    loader = DataLoader(range(many), batch_size=size, shuffle=shuffle, drop_last=drops)  # type: ignore[arg-type, var-annotated]
    whole = MapShard(DataLoader(range(many), batch_size=1, shuffle=shuffle), ranks(1)[0], 3)  # type: ignore[arg-type]
    order = [int(micro.data[0]) for micro in whole.epoch(2)]
    position = min(position, many)
    if drops and many < size * world:
        return
    parts = [list(MapShard(loader, own, 3).epoch(2, position)) for own in ranks(world)]
    assert len({len(part) for part in parts}) == 1
    dealt = [int(x) for part in parts for micro in part if micro.real for x in micro.data]
    left = order[position:]
    if drops:
        left = left[: len(left) // (size * world) * size * world]
    assert sorted(dealt) == sorted(left)
    # One round of all ranks is the next piece of the order.
    for index in range(len(parts[0])):
        together = {int(x) for part in parts if part[index].real for x in part[index].data}
        first = index * size * world
        assert together == set(left[first : first + size * world])


@pytest.mark.parametrize(("many", "position"), [(58, 56), (29, 28), (1, 0), (3, 0)])
def test_ranks_without_samples_continue(many: int, position: int) -> None:
    loader = DataLoader(range(many), batch_size=1, shuffle=True)  # type: ignore[arg-type, var-annotated]
    parts = [list(MapShard(loader, own, 3).epoch(0, position)) for own in ranks(8)]
    assert [[micro.real for micro in part] for part in parts] == [
        [at < many - position] for at in range(8)
    ]


@pytest.mark.parametrize("position", [0, 7 * 64])
def test_own_sampler_loses_no_sample_after_resume(position: int) -> None:
    many = 99 * 64 + 57
    loader = DataLoader(range(many), batch_size=64, drop_last=True, sampler=InOrder(range(many)))  # type: ignore[arg-type, var-annotated]
    parts = list(MapShard(loader, ranks(1)[0], 3).epoch(0, position))
    assert [len(micro.data) for micro in parts] == [64] * ((many - position) // 64)
    seen = [int(x) for micro in parts for x in micro.data]
    assert seen == list(range(position, position + len(seen)))


class InOrder(Sampler[int]):
    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)
