"""An optimizer is driven by its contract alone: what torch would have it see, it sees here."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional

from orchestrator import Trainer
from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.engine.core import optimizer
from orchestrator.engine.core.optimizer import FUSED, fuse_kernels
from orchestrator.engine.ranks.ranks import gather_values
from tests.engine import pair
from tests.engine.by_hand import (
    BATCH,
    FIRST,
    LATER,
    NONE,
    STEPS,
    Make,
    adamw,
    by_hand,
    clip_norm,
    clipping,
    falling,
    far,
    going_on,
    litter,
    made,
    momentum,
    net,
    thaw,
    trained,
)  # fmt: skip
from tests.engine.programs.optimizers import (
    ELEMENTWISE,
    OWN,
    ByTensor,
    Closing,
    Lists,
    Noisy,
    Opaque,
    Rateless,
)  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_groups_left")]

CLOSE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("make", FUSED)
def test_fused_optimizer_computes_same(make: Any, dtype: torch.dtype) -> None:
    """Kernels for processors leave some dtypes as they are, and make infinities of others."""
    found = {}
    for fused in (False, None):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(37).to(dtype))
        stepper = make([parameter], lr=0.05, fused=fused)
        if fused is None:
            fuse_kernels(stepper)
        for _ in range(3):
            parameter.grad = torch.randn(37).to(dtype)
            stepper.step()
        found[fused] = parameter.detach()
    torch.testing.assert_close(found[None], found[False], atol=CLOSE[dtype], rtol=0)


def test_fuse_keeps_choice_of_user() -> None:
    weight = [nn.Parameter(torch.zeros(2))]
    assert fuse_kernels(torch.optim.AdamW(weight))
    assert not fuse_kernels(torch.optim.AdamW(weight, fused=False))
    assert not fuse_kernels(torch.optim.AdamW(weight, foreach=True))


# -- one training, by hand and by the Trainer ------------------------------------------------------


def every(strategies: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Compare each kind of program with a loop by hand, in each of the layouts."""
    cases: list[tuple[str, Make, Any, slice]] = [
        ("skipped first, AdamW", adamw, None, FIRST),
        ("skipped later, AdamW", adamw, None, LATER),
        ("hook, SGD", clipping(momentum), None, NONE),
        ("hook, AdamW", clipping(adamw), None, NONE),
        ("unfreezing, AdamW", adamw, thaw, NONE),
    ]
    for name, make, after, poisoned in cases:
        expected = by_hand(make, after, poisoned)
        for more in strategies:
            litter()
            hook = after and (lambda t, call=after: call(t.bare, t.state.step))
            trainer = made(make, frozen=after is thaw, on_step_end=hook, **more)
            own = trained(trainer, poisoned)
            yield f"{name}, {more}", far(own, expected)


def test_one_process_trains_as_plain_loop() -> None:
    for name, distance in every([{}, {"accumulate": 4}]):
        assert distance < 2e-6, name


FALLS: dict[str, Any] = {
    "scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
    "warmup_steps": 3,
}


def test_clipping_schedule_and_scaling_match_plain_loop() -> None:
    """SGD, as AdamW divides by the size of the gradients."""
    clips = clipping(momentum, clip_norm)
    assert far(trained(made(momentum, clip_grad_norm=0.05)), by_hand(clips)) < 2e-6
    assert far(trained(made(momentum, **FALLS)), by_hand(falling(momentum))) < 2e-6
    for poisoned in (NONE, LATER):
        half = trained(made(momentum, precision="fp16"), poisoned)
        assert far(half, by_hand(momentum, None, poisoned)) < 5e-3


def test_two_ranks_train_as_plain_loop(tmp_path: Path) -> None:
    said = pair.run(train_on_two_ranks, tmp_path)
    assert said.count("equal") == 2, said


def train_on_two_ranks(rank: int, directory: Path) -> None:
    layouts = [{"strategy": name, "accumulate": 2} for name in ("ddp", "full_shard")]
    apart = {name: distance for name, distance in every(layouts) if distance > 2e-6}
    # Sums in float64 are not rounded to fewer bits.
    torch.set_default_dtype(torch.float64)
    for more in layouts:
        distance = far(trained(made(adamw, **more)), by_hand(adamw))
        apart |= {("fp64", *more.values()): distance} if distance > 1e-14 else {}
    print(apart or "equal", flush=True)


# -- what a checkpoint has of it -------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN)
def test_state_of_every_optimizer_is_resumed(tmp_path: Path, name: str) -> None:
    assert far(trained(made(OWN[name])), by_hand(OWN[name])) < 1e-6
    assert going_on(OWN[name], tmp_path) == 0


def halving(trainer: Trainer) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 0.5


def uneven(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    """Count another number of samples in each batch."""
    x, y = batch
    rows = 1 + int(100 * x[0, 0].abs()) % BATCH
    return functional.mse_loss(model(x[:rows]), y[:rows], reduction="sum"), rows


@pytest.mark.parametrize(
    "more",
    [{**FALLS, "clip_grad_norm": 0.05}, {"on_step_end": halving}, {"loss": None, "step": uneven}],
    ids=["scheduled", "changed by a hook", "uneven"],
)
def test_resume_with_options_is_exact(tmp_path: Path, more: dict[str, Any]) -> None:
    assert going_on(momentum, tmp_path, **more) == 0


def test_fp16_scale_is_resumed(tmp_path: Path) -> None:
    more = {"save_to": tmp_path, "save_every": "4 steps"}
    first, again = (made(momentum, precision="fp16") for _ in range(2))
    trained(first, LATER, max_period="4 steps", **more)
    trained(again, resume=True, max_period="4 steps", **more)
    found = [
        (float(s.scale), float(s.good), float(s.skipped))
        for s in (first.parts.steppers.first, again.parts.steppers.first)
    ]
    assert found == [(2.0**15, 1, 1)] * 2


def in_layout(name: str, strategy: str) -> dict[str, Any]:
    return {"strategy": strategy, "elementwise": name in ("attribute", "shared")}


def go_on_on_two_ranks(rank: int, directory: Path) -> None:
    cases = [("ddp", "lists"), ("ddp", "inner"), *(("full_shard", name) for name in ELEMENTWISE)]
    apart = {
        (strategy, name): going_on(
            OWN[name], directory / f"{name} {strategy}", **in_layout(name, strategy)
        )
        for strategy, name in cases
    }
    print({name: distance for name, distance in apart.items() if distance} or "equal", flush=True)
    refuse_opaque(directory / "opaque", strategy="ddp")
    hand_over(strategy="full_shard")


def several(parameters: Any) -> Any:
    every = list(parameters)
    matrices, others = ([p for p in every if (p.dim() > 1) is wide] for wide in (True, False))
    return optimizer.one_of_several([momentum(matrices), adamw(others)])


def test_a_state_is_handed_over_by_torchs_own_calls() -> None:
    hand_over()


def hand_over(**more: Any) -> None:
    for make in (adamw, several):
        first, again = (made(make, **more) for _ in range(2))
        trained(first)
        state = get_optimizer_state_dict(first.bare, first.optimizer)
        set_optimizer_state_dict(again.bare, again.optimizer, state)
        states = [trainer.optimizer.state_dict()["state"] for trainer in (first, again)]
        assert states[0].keys() == set(range(6)), make
        torch.testing.assert_close(*states, rtol=0, atol=0)


def draw_on_two_ranks(rank: int, directory: Path) -> None:
    first, *others = gather_values(trained(made(Noisy, strategy="ddp")))
    again = going_on(Noisy, directory / "noise", strategy="ddp")
    print(max(again, *(far(other, first) for other in others)) or "equal", flush=True)


def take_what_is_elementwise(rank: int, directory: Path) -> None:
    apart = {}
    for kind in optimizer.ELEMENTWISE:
        own = trained(made(lambda ps, kind=kind: kind(ps, lr=1e-3), strategy="full_shard"))
        apart[kind.__name__] = far(own, by_hand(lambda ps, kind=kind: kind(ps, lr=1e-3)))
    print({name: far for name, far in apart.items() if far > 1e-6} or "equal", flush=True)
    other = [torch.optim.Rprop, torch.optim.Adafactor, Lists, type("Own", (torch.optim.AdamW,), {})]
    for make in other:
        words = f'{make.__name__} may need whole tensors.*\n.*"ddp".*, or elementwise=True'
        with pytest.raises(UsageError, match=words):
            made(make, strategy="full_shard")
        trained(made(make, strategy="ddp"), max_period="1 steps")


def test_state_moves_between_layouts(tmp_path: Path) -> None:
    """Two sharded ranks resume from one process's state, and one process from theirs."""
    whole = trained(made(adamw))
    trained(made(adamw), max_period="4 steps", save_to=tmp_path / "a", save_every="4 steps")
    said = pair.run(move_to_two_ranks, tmp_path)
    assert "moved" in said
    ended = made(adamw)
    more = {"save_to": tmp_path / "a", "save_every": "2 steps", "resume": True}
    assert far(trained(ended, **more), whole) < 1e-6


def move_to_two_ranks(rank: int, directory: Path) -> None:
    more = {"save_to": directory / "a", "save_every": "2 steps", "resume": True}
    trained(made(adamw, strategy="full_shard"), max_period="5 steps", **more)
    print("moved", flush=True)


class Counting:
    """Is kept, and counts how often it is asked for its state."""

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"asked": torch.tensor(self.asked)}

    def load_state_dict(self, state: Any) -> None: ...


def test_save_reads_each_state_once(tmp_path: Path) -> None:
    """Both may be costly: an optimizer may gather its state, a replay buffer is large."""
    trainer, holder, asked = made(adamw), Counting(), []
    trainer.keep("counting", holder)
    trainer.optimizer.register_state_dict_pre_hook(asked.append)
    before = holder.asked
    more = {"save_to": tmp_path, "save_every": "2 steps"}
    trained(trainer, **more)
    # The first step also asks.
    assert holder.asked - before == len(asked) - 1 == STEPS // 2


def test_unsavable_state_is_refused_in_first_step(tmp_path: Path) -> None:
    refuse_opaque(tmp_path)


def refuse_opaque(place: Path, **more: Any) -> None:
    for kind, what in ((Opaque, "'how'] is a function"), (ByTensor, "'past'] is a dict")):
        trainer = made(kind, **more)
        with pytest.raises(UsageError, match=re.escape(f"{what}, which cannot be kept")):
            trained(trainer, save_to=place)
        assert trainer.state.step == 1, kind
    trained(made(Opaque, **more))


def test_state_of_other_optimizer_is_refused(tmp_path: Path) -> None:
    trained(made(adamw), save_to=tmp_path)
    with pytest.raises(CheckFailed, match="it was saved with AdamW, this is SGD"):
        trained(made(momentum), save_to=tmp_path, resume=True)
    later = made(momentum)
    later.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(UsageError, match="was given other parameters after the Trainer"):
        trained(later)


def test_frozen_parameters_gather_no_gradient() -> None:
    model = net()
    trainer = Trainer(model, adamw(model.get_submodule("4").parameters()), functional.mse_loss)
    trained(trainer)
    assert all(parameter.grad is None for parameter in trainer.bare.parameters())


# -- what has modes, and what cannot work ----------------------------------------------------------


@pytest.mark.parametrize("make", [torch.optim.LBFGS, Closing])
def test_optimizer_with_closure_is_refused(make: Any) -> None:
    with pytest.raises(UsageError, match=f"{make.__name__} evaluates the loss several times"):
        made(make)


def test_schedule_free_optimizer_is_refused() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        free = adamw(parameters)
        # A schedule-free optimizer has these methods.
        free.eval = free.train = lambda: None
        return free

    with pytest.raises(UsageError, match="AdamW has train"):
        made(make)


def test_optimizer_without_learning_rate_trains() -> None:
    trained(made(Rateless))


@pytest.mark.parametrize(
    "program", [go_on_on_two_ranks, draw_on_two_ranks, take_what_is_elementwise]
)
def test_two_ranks_equal_plain_loop_or_each_other(
    program: Callable[[int, Path], None], tmp_path: Path
) -> None:
    said = pair.run(program, tmp_path)
    assert said.count("equal") == 2, said
