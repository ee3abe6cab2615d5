"""Optimizers that need whole tensors are right in shards: each parameter has an owner."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Adafactor
from torch.utils.data import DataLoader

from orchestrator.common.errors import UsageError
from orchestrator.engine.core.together import one_of_several
from orchestrator.engine.ranks.ranks import gather
from orchestrator.engine.sharding import exchange
from tests.engine.by_hand import (
    BATCH,
    FIRST,
    NONE,
    STEPS,
    adamw,
    by_hand,
    clip_norm,
    clipping,
    data,
    far,
    going_on,
    made,
    momentum,
    moved_to_two_ranks_and_back,
    moving,
    thaw,
    trained,
    whole,
)  # fmt: skip
from tests.engine.programs.optimizers import (
    Begun,
    Coarse,
    Copying,
    Gauging,
    Lists,
    Noisy,
    Roots,
    Roundabout,
    Switching,
    Taken,
    Tossing,
    Turned,
)
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.usefixtures("no_groups_left")
LIFE = "STEPS_OF_THIS_LIFE"
LAYOUTS = ("ddp", "full_shard")


def beside(parameters: Any) -> Any:
    """One of the two needs owners."""
    every = list(parameters)
    vectors = adamw([p for p in every if p.dim() != 2])
    return one_of_several([Roots([p for p in every if p.dim() == 2]), vectors])


def test_two_ranks_train_and_go_on_as_a_loop_by_hand(tmp_path: Path) -> None:
    moved_to_two_ranks_and_back(Roots, train_on_two_ranks, tmp_path)


def train_on_two_ranks(rank: int, directory: Path) -> None:
    cases: dict[str, tuple[Any, Any, slice]] = {
        "roots": (Roots, None, NONE),
        "beside": (beside, None, NONE),
        "copying": (Copying, None, NONE),
        "Adafactor": (lambda p: Adafactor(p, lr=1e-2), None, NONE),
        "skipped": (Roots, None, FIRST),
        "hook": (clipping(Roots, clip_norm), None, NONE),
        "unfreezing": (Roots, thaw, NONE),
    }
    apart: dict[str, float] = {}
    for name, (make, after, poisoned) in cases.items():
        hook = after and (lambda t, call=after: call(t.bare, t.state.step))
        more = {"strategy": "full_shard", "accumulate": 2, "on_step_end": hook}
        trainer = made(make, frozen=after is thaw, **more)
        # On shards torch 2.8 can copy, and its Adafactor cannot be.
        if hasattr(torch.optim, "Muon") or name not in ("copying", "Adafactor"):
            assert bool(trainer.parts.steppers.first.owners) is (name != "Adafactor"), name
        apart[name] = far(trained(trainer, poisoned), by_hand(make, after, poisoned))
    apart |= {f"noise, {strategy}": noise(strategy, directory) for strategy in LAYOUTS}
    apart["in turns"] = in_turns()
    for make in (beside, Turned):
        place = directory / make.__name__
        apart[f"going on, {make.__name__}"] = 1e6 * going_on(make, place, strategy="full_shard")
    keep_how_they_lie(directory / "turned")
    trained(made(Roots, strategy="full_shard"), max_period="5 steps", **moving(directory))
    print({n: distance for n, distance in apart.items() if distance > 1e-6} or "equal", flush=True)
    choose(rank)


def noise(strategy: str, directory: Path) -> float:
    """What is drawn is the same in all copies, and after a resume."""
    ended = trained(made(Noisy, strategy=strategy))
    first, *others = gather(ended)
    again = going_on(Noisy, directory / f"noise {strategy}", strategy=strategy)
    return max(again, *(far(other, first) for other in others))


def keep_how_they_lie(place: Path) -> None:
    """A matrix that is multiplied in another order comes to other bits."""
    first, again = (made(Turned, strategy="full_shard") for _ in range(2))
    trained(first)
    first.save_checkpoint(place)
    again.load_checkpoint(place)
    found = []
    for one in (first, again):
        states = [one.optimizer.state.get(p, {}) for p in one.bare.parameters()]
        found.append([s["base"].stride() + s["like"].stride() for s in states if s])
    assert found[0] == found[1], found


def in_turns() -> float:
    """Few are whole at a time, and the count of steps goes on as if they all were."""
    before, exchange.PER_MESSAGE = exchange.PER_MESSAGE, 100
    trainer = made(Taken, strategy="full_shard")
    distance = far(trained(trainer), by_hand(Taken))
    exchange.PER_MESSAGE = before
    optimizer = trainer.optimizer
    assert isinstance(optimizer, Taken)
    largest, hollow = 8 * 8 * 4, 6 * 4
    assert max(optimizer.bytes) <= largest + hollow, optimizer.bytes
    assert len(optimizer.bytes) > STEPS
    return distance


def choose(rank: int) -> None:
    """Only those that need owners have them: the others are right on shards, or look at all."""
    for seed in range(4):
        random.seed(seed)
        before = random.getstate()
        assert made(Tossing, strategy="full_shard").parts.steppers.first.owners
        assert random.getstate() == before
    for make, owned in [(Coarse, True), (Lists, False), (momentum, False), (Switching, False)]:
        assert bool(made(make, strategy="full_shard").parts.steppers.first.owners) is owned, make
    with pytest.raises(UsageError, match="and has state of them before its first step"):
        made(Begun, strategy="full_shard")
    for make in (Roundabout, Gauging):
        with pytest.raises(UsageError, match=rf"{make.__name__}.* with sharded parameters"):
            made(make, strategy="full_shard")


def test_two_by_two_go_on_from_memory(tmp_path: Path) -> None:
    call, memory = f"{__name__}:live", {"memory": str(tmp_path / "memory")}
    first = Job(str(tmp_path / "first"), [2, 2], {}, call=call, env={LIFE: "4"}, **memory)
    again = Job(str(tmp_path / "again"), [2, 2], {}, call=call, env={LIFE: str(STEPS)}, **memory)
    assert run(first, again) == [[0] * 4] * 2, first.output() + again.output()
    assert "resuming after step 4, from memory" in again.output()
    assert far(torch.load(again.path / "weights"), by_hand(Roots)) < 1e-6


def live(directory: Path) -> None:
    keys = {"checkpoint": {"memory_every": 1}, "fsdp": {"shard_size": 2}}
    trainer = made(Roots, strategy="hybrid_shard", config=keys)
    loader = DataLoader(data(), BATCH // 4)
    trainer.train(loader, epochs=1, max_period=f"{os.environ[LIFE]} steps")
    ended = whole(trainer)
    if trainer.ranks.rank == 0:
        torch.save(ended, directory / "weights")
