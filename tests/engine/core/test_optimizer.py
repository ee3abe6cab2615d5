"""An optimizer is driven by its contract alone: what torch would have it see, it sees here."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from orchestrator import Trainer
from orchestrator.common.errors import UsageError
from orchestrator.engine.core.optimizer import FUSED, can_fuse
from tests.engine import pair
from tests.engine.programs.optimizers import OWN, Closed, Closing, Finer, Rateless, Switching
from tests.engine.worlds import Job, run

CLOSE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 4e-3}
STEPS, BATCH = 8, 8
LIFE = "STEPS_OF_THIS_LIFE"
Make = Callable[[Any], Optimizer]


@pytest.fixture(scope="module", autouse=True)
def _groups() -> Iterator[None]:
    """Leave no process group to other tests: a Trainer makes one of this process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("make", FUSED)
def test_what_is_fused_computes_the_same(make: Any, dtype: torch.dtype) -> None:
    """Kernels for processors leave some dtypes as they are, and make infinities of others."""
    found = {}
    for fused in (False, None):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(37).to(dtype))
        optimizer = make([parameter], lr=0.05, fused=fused)
        if fused is None and can_fuse(optimizer):
            optimizer.param_groups[0]["fused"] = True
        for _ in range(3):
            parameter.grad = torch.randn(37).to(dtype)
            optimizer.step()
        found[fused] = parameter.detach()
    torch.testing.assert_close(found[None], found[False], atol=CLOSE[dtype], rtol=0)


def test_a_choice_of_the_user_stays() -> None:
    weight = [nn.Parameter(torch.zeros(2))]
    assert can_fuse(torch.optim.AdamW(weight))
    assert not can_fuse(torch.optim.AdamW(weight, fused=False))
    assert not can_fuse(torch.optim.AdamW(weight, foreach=True))


# -- one training, by hand and by the Trainer ------------------------------------------------------


def net(*, frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    layers[2].requires_grad_(not frozen)
    return nn.Sequential(*layers)


def data(poisoned: int = 0) -> TensorDataset:
    """Samples, of which the first ones are no numbers."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * BATCH, 6, generator=draw)
    y = torch.sin(x @ torch.randn(6, 4, generator=draw))
    x[:poisoned] = float("nan")
    return TensorDataset(x, y)


def litter() -> None:
    """Leave in freed memory what any program leaves there."""
    for shape in ((8, 6), (8, 8), (4, 8), (8,), (4,)):
        _ = [torch.full(shape, 1e3) for _ in range(50)]


def by_hand(
    make: Make, after: Callable[[nn.Module, int], None] | None = None, poisoned: int = 0
) -> dict[str, Tensor]:
    model = net(frozen=after is thaw)
    optimizer = make(model.parameters())
    for number, (x, y) in enumerate(DataLoader(data(poisoned), BATCH), 1):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        if loss.isfinite():
            optimizer.step()
        if after is not None:
            after(model, number)
    return dict(model.state_dict())


def made(make: Make, *, frozen: bool = False, later: bool = False, **more: Any) -> Trainer:
    """Make a Trainer, which makes the optimizer later, from the parameters as it spreads them."""
    model = net(frozen=frozen)
    optimizer = make if later else make(model.parameters())
    return Trainer(model, optimizer, functional.mse_loss, **more)


def whole(trainer: Trainer) -> dict[str, Tensor]:
    """All of the weights, on every rank."""
    return {
        name: (w.full_tensor() if hasattr(w, "full_tensor") else w).detach()
        for name, w in trainer.bare.named_parameters()
    }


def trained(trainer: Trainer, poisoned: int = 0, **more: Any) -> dict[str, Tensor]:
    batch = BATCH // (trainer.ranks.world * trainer.config.training.gradient_accumulation)
    trainer.train(DataLoader(data(poisoned), batch), epochs=1, verbose=False, **more)
    return whole(trainer)


def far(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=1e-2)


def clipping(make: Make) -> Make:
    """An optimizer with a hook, which clips gradients by value, as many programs do."""

    def hooked(parameters: Any) -> Optimizer:
        optimizer = make(parameters)
        optimizer.register_step_pre_hook(clip)
        return optimizer

    def clip(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_value_(group["params"], 1e-3)

    return hooked


def thaw(model: nn.Module, step: int) -> None:
    """Have the second layer trained from the third step on."""
    model.get_submodule("2").requires_grad_(step >= 2)


def clamp_by_assignment(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.2, 0.2)


def every(strategies: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Compare each kind of program with a loop by hand, in each of the layouts."""
    cases: list[tuple[str, Make, Any, int]] = [
        ("skipped first, SGD", momentum, None, BATCH),
        ("skipped first, AdamW", adamw, None, BATCH),
        ("hook, SGD", clipping(momentum), None, 0),
        ("hook, AdamW", clipping(adamw), None, 0),
        ("unfreezing, SGD", momentum, thaw, 0),
        ("unfreezing, AdamW", adamw, thaw, 0),
        ("assignment", momentum, clamp_by_assignment, 0),
    ]
    for name, make, after, poisoned in cases:
        expected = by_hand(make, after, poisoned)
        for more in strategies:
            litter()
            hook = after and (lambda t, call=after: call(t.bare, t.state.step))
            trainer = made(make, frozen=after is thaw, on_step_end=hook, **more)
            own = trained(trainer, poisoned)
            yield f"{name}, {more}", far(own, expected)


def test_one_process_trains_as_a_loop_by_hand() -> None:
    for name, distance in every([{}, {"accumulate": 4}]):
        assert distance < 2e-6, name


def test_two_ranks_train_as_a_loop_by_hand(tmp_path: Path) -> None:
    said = pair.run(train_on_two_ranks, tmp_path)
    assert said.count("equal") == 2, said


def train_on_two_ranks(rank: int, directory: Path) -> None:
    layouts = [{"strategy": name, "accumulate": 2} for name in ("ddp", "full_shard")]
    apart = {name: distance for name, distance in every(layouts) if distance > 2e-6}
    print(apart or "equal", flush=True)


# -- what a checkpoint has of it -------------------------------------------------------------------


def going_on(make: Make, place: Path, **more: Any) -> float:
    """Train half, and the rest from a checkpoint; compare with all at once, to the bit."""
    at_once = trained(made(make, **more))
    saved = {"save_to": place, "save_every": "4 steps"}
    trained(made(make, **more), max_period="4 steps", **saved)
    return far(trained(made(make, **more), resume=True, **saved), at_once)


@pytest.mark.parametrize("name", OWN)
def test_all_that_an_optimizer_keeps_outlives_it(tmp_path: Path, name: str) -> None:
    assert far(trained(made(OWN[name])), by_hand(OWN[name])) < 1e-6
    assert going_on(OWN[name], tmp_path) == 0


def test_it_outlives_two_ranks_too(tmp_path: Path) -> None:
    said = pair.run(go_on_on_two_ranks, tmp_path)
    assert said.count("equal") == 2, said


def go_on_on_two_ranks(rank: int, directory: Path) -> None:
    apart = {}
    for strategy, (name, make) in itertools.product(("ddp", "full_shard"), OWN.items()):
        # What has optimizers inside has to be made from the shards themselves.
        more = {"strategy": strategy, "later": name == "inner"}
        apart[strategy, name] = going_on(make, directory / f"{name} {strategy}", **more)
    print({name: distance for name, distance in apart.items() if distance} or "equal", flush=True)
    with pytest.raises(UsageError, match=r"Inner holds 0.weight outside its own groups"):
        made(OWN["inner"], strategy="full_shard")


def test_it_outlives_the_ranks_in_memory(tmp_path: Path) -> None:
    """In shards: what another life of the ranks kept in memory is gone on from, to the bit."""
    call, memory = f"{__name__}:live", {"memory": str(tmp_path / "memory")}
    whole = Job(str(tmp_path / "whole"), [2], {}, call=call, env={LIFE: str(STEPS)})
    first = Job(str(tmp_path / "first"), [2], {}, call=call, env={LIFE: "4"}, **memory)
    again = Job(str(tmp_path / "again"), [2], {}, call=call, env={LIFE: str(STEPS)}, **memory)
    assert run(whole, first, again) == [[0, 0]] * 3, first.output() + again.output()
    assert again.output().count("resuming after step 4, from memory") == len(OWN)
    expected, found = (torch.load(job.path / "weights") for job in (whole, again))
    for name, weights in expected.items():
        assert far(found[name], weights) == 0, name


def live(directory: Path) -> None:
    """Train with every optimizer, for as many steps as this life of the ranks has."""
    ended = {}
    for name, make in OWN.items():
        keys = {"checkpoint": {"memory_every": 1}}
        trainer = made(make, later=name == "inner", strategy="full_shard", config=keys)
        loader = DataLoader(data(), BATCH // 2)
        trainer.train(loader, epochs=1, max_period=f"{os.environ[LIFE]} steps")
        ended[name] = whole(trainer)
    if trainer.ranks.rank == 0:
        torch.save(ended, directory / "weights")


def test_a_state_moves_between_layouts(tmp_path: Path) -> None:
    """What one process saved, two ranks go on from in shards, and one from theirs."""
    whole = trained(made(adamw))
    trained(made(adamw), max_period="4 steps", save_to=tmp_path / "a", save_every="4 steps")
    said = pair.run(move_to_two_ranks, tmp_path)
    assert "moved" in said
    ended = made(adamw)
    more = {"save_to": tmp_path / "a", "save_every": "2 steps", "resume": True}
    assert far(trained(ended, **more), whole) < 1e-6


def move_to_two_ranks(rank: int, directory: Path) -> None:
    more = {"save_to": directory / "a", "save_every": "2 steps", "resume": True}
    trained(made(adamw, strategy="full_shard"), max_period="6 steps", **more)
    print("moved", flush=True)


def test_state_that_is_finer_than_its_weights_is_not_rounded(tmp_path: Path) -> None:
    def coarse() -> Trainer:
        model = net().to(torch.bfloat16)
        return Trainer(
            model, Finer(model.parameters()), lambda o, t: functional.mse_loss(o.float(), t)
        )

    first, again = coarse(), coarse()
    batches = [(x.bfloat16(), y) for x, y in DataLoader(data(), BATCH)]
    first.train(batches, epochs=1, verbose=False)
    first.save_checkpoint(tmp_path)
    again.load_checkpoint(tmp_path)
    found = [list(one.optimizer.state.values()) for one in (first, again)]
    for one, other in zip(*found, strict=True):
        assert other["mean"].dtype == torch.float32
        assert other["kind"] == "finer"
        assert one["mean"].equal(other["mean"])


# -- what has modes, and what cannot work ----------------------------------------------------------


def test_what_tells_training_from_evaluation_is_told(tmp_path: Path) -> None:
    """Evaluations and saves have the weights that it shows then, steps those that it trains."""
    trainer = made(Switching)
    loader = DataLoader(data(), BATCH)
    trainer.train(loader, loader, epochs=1, save_every="4 steps", save_to=tmp_path, verbose=False)
    optimizer = trainer.optimizer
    assert isinstance(optimizer, Switching)
    turns = "".join(optimizer.turns)
    assert turns == "T" + "s" * 4 + "ET" + "s" * 4 + "ET" * 2
    trainer.evaluate(loader)
    assert optimizer.turns[-1] == "E", "nobody trains any more"


@pytest.mark.parametrize("make", [torch.optim.LBFGS, Closing])
def test_what_needs_a_closure_is_refused(make: Any) -> None:
    with pytest.raises(UsageError, match=f"{make.__name__} evaluates the loss several times"):
        made(make)


def test_what_fails_in_its_first_step_is_named() -> None:
    with pytest.raises(UsageError, match=r"Closed\.step\(\) fails: AssertionError no closure"):
        trained(made(Closed))


def test_an_optimizer_may_have_no_learning_rate() -> None:
    trained(made(Rateless))
    with pytest.raises(UsageError, match="Rateless has no learning rate"):
        trained(made(Rateless, warmup_steps=3))
