"""A bit that changes by itself is found, its rank named, and what was saved with it not used."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from orchestrator import Trainer
from orchestrator.engine.ranks import agreement
from orchestrator.engine.ranks.ranks import Ranks
from orchestrator.engine.sharding import corruption
from orchestrator.engine.sharding.corruption import Difference
from tests.engine.programs import trainings as trained
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("hashes", "odd"),
    [
        ([7, 7], ()),
        ([7, 8], (0, 1)),
        ([7, 7, 8], (2,)),
        ([8, 7, 7], (0,)),
        ([7, 8, 9], (0, 1, 2)),
        ([7, 7, 8, 8], (0, 1, 2, 3)),
        ([7, 7, 8, 7, 9], (2, 4)),
    ],
)
def test_the_odd_ones_are_those_outside_the_majority(
    hashes: list[int], odd: tuple[int, ...]
) -> None:
    assert corruption.odd_ones(hashes) == odd


def test_each_set_of_copies_has_its_own_difference() -> None:
    """Ranks 0, 2 and 4 hold one shard, 1, 3 and 5 the other."""
    hashes = [[1, 2], [5, 6], [1, 2], [5, 0], [1, 2], [5, 6]]
    copies = [[0, 2, 4], [1, 3, 5]]
    found = corruption.differences(["a", "b"], hashes, copies)
    assert found == [Difference("b", (3,), (1, 3, 5))]
    assert corruption.differences(["a", "b"], hashes, copies[:1]) == []


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            Difference("w", (1,), (0, 1, 2)),
            "silent corruption: rank 1 (node 0, a) holds other bits in w than the other 2 copies"
            " after step 9; after step 6 all were equal",
        ),
        (
            Difference("w", (0, 2), (0, 2)),
            "silent corruption: rank 0 (node 0, a) and rank 2 (node 1, b) hold different bits in w"
            " after step 9; after step 6 all were equal; of two copies nobody can say which one is"
            " right",
        ),
    ],
)
def test_it_is_said_whose_copy_it_is(found: Difference, words: str) -> None:
    ranks = Ranks(0, 3, 0, torch.device("cpu"), ((0, "a"), (0, "a"), (1, "b")))
    assert corruption.in_words(found, ranks, 6, 9) == words


FLIPPED = 7  # after the optimizer's step


def flips_a_bit(made: Trainer) -> None:
    """One bit of the last rank's own weights changes, once."""
    if made.state.step == FLIPPED and made.ranks.rank == made.ranks.world - 1:
        weight = made.bare.layers[1].weight
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        local.detach().view(torch.int32).view(-1)[3] ^= 1 << 20
    if made.state.step > FLIPPED:
        time.sleep(0.05)  # as a real step takes; the comparison needs a moment beside it


def trains(directory: Path) -> None:
    resumed = bool(os.environ.get("RESUMED"))
    model = trained.net()
    made = Trainer(
        model,
        trained.optimizer(model),
        nn.CrossEntropyLoss(),
        strategy=os.environ["STRATEGY"],
        on_step_end=None if resumed else flips_a_bit,
        config={"distributed": {"compare_copies": 3}, "checkpoint": {"keep": 9}},
    )
    size = 12 * made.ranks.world
    made.train(
        torch.utils.data.DataLoader(trained.samples(size * 2), batch_size=4),
        max_period="12 steps" if resumed else "100 steps",
        save_every="2 steps",
        save_to=directory / "kept",
        resume=True,
    )


def job(directory: Path, nodes: list[int], strategy: str, **env: str) -> Job:
    call = "tests.engine.sharding.test_corruption:trains"
    return Job(str(directory), nodes, {}, {"STRATEGY": strategy, **env}, call=call)


@pytest.mark.parametrize(("nodes", "strategy"), [([1, 1, 1], "ddp"), ([2, 2], "hybrid_shard")])
def test_a_flipped_bit_is_found(tmp_path: Path, nodes: list[int], strategy: str) -> None:
    world = sum(nodes)
    flipped = job(tmp_path, nodes, strategy)
    (codes,) = run(flipped)
    assert all(codes)
    said = flipped.output(world - 1)
    if world == 3:
        found = f"silent corruption: rank 2 (node 2, {os.uname().nodename}) holds other bits in"
        assert f"{found} layers.1.weight than the other 2 copies after step 8;" in said
        assert "silent corruption" not in flipped.output(0) + flipped.output(1)
    else:
        pair = [flipped.output(rank) for rank in (1, 3)]
        assert any("rank 1 (node 0, " in text and "and rank 3 (node 1, " in text for text in pair)
        assert any("hold different bits in layers.1.weight after step 8;" in text for text in pair)
    assert "after step 6 all were equal" in "".join(map(flipped.output, range(world)))

    kept = sorted(path.name for path in (tmp_path / "kept").glob("step_*"))
    assert kept[:3] == ["step_00000002", "step_00000004", "step_00000006"]
    assert all(name.endswith(".suspect") for name in kept[3:])
    again = job(tmp_path, nodes, strategy, RESUMED="1")
    assert run(again) == [[0] * world]
    assert "resuming after step 6" in again.output()


def test_a_hash_stays_where_its_tensor_is() -> None:
    value = torch.arange(5.0)
    assert int(agreement.hash_there(value)) == agreement.hash_of(value)
    assert agreement.hash_there(value.to("meta")).is_meta
