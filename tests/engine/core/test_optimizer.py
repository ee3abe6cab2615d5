"""An optimizer is driven by its contract alone: what torch would have it see, it sees here."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from orchestrator import Trainer
from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.engine.core import optimizer_state
from orchestrator.engine.core.optimizer import FUSED, can_fuse
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
    clamp_by_assignment,
    clip_norm,
    clipping,
    data,
    falling,
    far,
    going_on,
    litter,
    made,
    momentum,
    net,
    replacing,
    thaw,
    trained,
    whole,
)  # fmt: skip
from tests.engine.programs.optimizers import (
    OWN,
    ByTensor,
    Closed,
    Closing,
    Drawing,
    Finer,
    Locked,
    Opaque,
    Rateless,
    Switching,
    Unreadable,
)  # fmt: skip
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.usefixtures("no_groups_left")
CLOSE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 4e-3}
LIFE = "STEPS_OF_THIS_LIFE"


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


def every(strategies: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Compare each kind of program with a loop by hand, in each of the layouts."""
    cases: list[tuple[str, Make, Any, slice]] = [
        ("skipped first, SGD", momentum, None, FIRST),
        ("skipped first, AdamW", adamw, None, FIRST),
        ("skipped later, AdamW", adamw, None, LATER),
        ("hook, SGD", clipping(momentum), None, NONE),
        ("hook, AdamW", clipping(adamw), None, NONE),
        ("step() replaced, AdamW", replacing(adamw), None, NONE),
        ("unfreezing, SGD", momentum, thaw, NONE),
        ("unfreezing, AdamW", adamw, thaw, NONE),
        ("assignment", momentum, clamp_by_assignment, NONE),
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


FALLS: dict[str, Any] = {
    "scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
    "warmup_steps": 3,
}


def test_a_step_is_clipped_scheduled_and_unscaled_as_by_hand() -> None:
    """SGD, as AdamW divides by the size of the gradients."""
    clips = clipping(momentum, clip_norm)
    assert far(trained(made(momentum, clip_grad_norm=0.05)), by_hand(clips)) < 2e-6
    assert far(trained(made(momentum, **FALLS)), by_hand(falling(momentum))) < 2e-6
    for poisoned in (NONE, LATER):
        half = trained(made(momentum, precision="fp16"), poisoned)
        assert far(half, by_hand(momentum, None, poisoned)) < 5e-3


def test_two_ranks_train_as_a_loop_by_hand(tmp_path: Path) -> None:
    said = pair.run(train_on_two_ranks, tmp_path)
    assert said.count("equal") == 2, said


def train_on_two_ranks(rank: int, directory: Path) -> None:
    layouts = [{"strategy": name, "accumulate": 2} for name in ("ddp", "full_shard")]
    apart = {name: distance for name, distance in every(layouts) if distance > 2e-6}
    torch.set_default_dtype(torch.float64)  # in which sums are not rounded to less
    for more in layouts:
        distance = far(trained(made(adamw, **more)), by_hand(adamw))
        apart |= {("fp64", *more.values()): distance} if distance > 1e-14 else {}
    print(apart or "equal", flush=True)


# -- what a checkpoint has of it -------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN)
def test_all_that_an_optimizer_keeps_outlives_it(tmp_path: Path, name: str) -> None:
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
def test_a_step_is_resumed_as_it_was(tmp_path: Path, more: dict[str, Any]) -> None:
    assert going_on(momentum, tmp_path, **more) == 0


def test_the_scale_of_fp16_is_resumed(tmp_path: Path) -> None:
    more = {"save_to": tmp_path, "save_every": "4 steps"}
    first, again = (made(momentum, precision="fp16") for _ in range(2))
    trained(first, LATER, max_period="4 steps", **more)
    trained(again, resume=True, max_period="4 steps", **more)
    found = [
        (float(s.scale), float(s.good), float(s.skipped))
        for s in (first.parts.steppers.first, again.parts.steppers.first)
    ]
    assert found == [(2.0**15, 1, 1)] * 2


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
    refuse_opaque(directory / "opaque", strategy="full_shard")
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
        ((mean, text),) = other["inside"]["means"]
        assert mean.equal(one["mean"])
        assert text == "a text"
        assert one["mean"].equal(other["mean"])


class Counting:
    """Is kept, and counts how often it is asked for its state."""

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"asked": torch.tensor(self.asked)}

    def load_state_dict(self, state: Any) -> None: ...


def test_a_save_asks_for_each_state_once(tmp_path: Path) -> None:
    """Both may be costly: an optimizer may gather its state, a replay buffer is large."""
    trainer, holder, asked = made(adamw), Counting(), []
    trainer.keep("counting", holder)
    trainer.optimizer.register_state_dict_pre_hook(asked.append)
    before = holder.asked
    more = {"save_to": tmp_path, "save_every": "2 steps"}
    trained(trainer, **more)
    assert holder.asked - before == len(asked) - 1 == STEPS // 2  # the first step asks, too


def test_what_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path: Path) -> None:
    refuse_opaque(tmp_path)


def refuse_opaque(place: Path, **more: Any) -> None:
    """Before the first step, or in it where there can be no trial."""
    how = r"how \(function\)"
    for kind, what, steps in ((Opaque, how, 0), (Locked, how, 1), (ByTensor, r"past \(dict\)", 0)):
        trainer = made(kind, **more)
        with pytest.raises(UsageError, match=f"no checkpoint can hold {what}"):
            trained(trainer, save_to=place)
        assert trainer.state.step == steps, kind
    trained(made(Opaque, **more))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Drawing, "what Drawing saves is not all that its steps depend on"),
        (Unreadable, "Unreadable does not read it: KeyError 'optimizer'"),
        (OWN["counting"], ""),
    ],
)
def test_a_resume_that_will_not_be_exact_is_said_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, words: str
) -> None:
    said: list[str] = []
    trainer = made(make, on_train_begin=lambda _: said.append(capsys.readouterr().out))
    trainer.train(DataLoader(data(), BATCH), max_period="2 steps", save_to=tmp_path)
    warned = [line for line in said[0].splitlines() if "WARNING" in line]
    expected = f"WARNING: a resume will not go on to the bit: {words}"
    assert [line.partition("] ")[2] or line for line in warned] == [expected] * bool(words)


def test_a_number_that_the_program_gives_is_not_that_of_before(tmp_path: Path) -> None:
    """What steps have not changed is a setting."""
    first, again = made(OWN["counting"]), made(OWN["counting"])
    trained(first)
    first.save_checkpoint(tmp_path)
    again.optimizer.least = 0.25  # type: ignore[attr-defined]
    again.load_checkpoint(tmp_path)
    found = vars(again.optimizer)
    assert (found["least"], found["latest"]) == (0.25, vars(first.optimizer)["latest"])
    assert found["counted"]["steps"] == STEPS


def test_a_state_is_that_of_its_own_optimizer(tmp_path: Path) -> None:
    trained(made(adamw), save_to=tmp_path)
    with pytest.raises(CheckFailed, match="it was saved with AdamW, this is SGD"):
        trained(made(momentum), save_to=tmp_path, resume=True)
    later = made(momentum)
    later.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(UsageError, match="was given other parameters after the Trainer"):
        trained(later)


def test_nothing_gathers_in_what_is_not_trained() -> None:
    model = net()
    trainer = Trainer(model, adamw(model.get_submodule("4").parameters()), functional.mse_loss)
    trained(trainer)
    assert all(parameter.grad is None for parameter in trainer.bare.parameters())


# -- what has modes, and what cannot work ----------------------------------------------------------


def test_what_tells_training_from_evaluation_is_told(tmp_path: Path) -> None:
    """Evaluations and saves have the weights that it shows then, steps those that it trains."""
    trainer = made(Switching)
    loader = DataLoader(data(), BATCH)
    trainer.train(loader, loader, epochs=1, save_every="4 steps", save_to=tmp_path, verbose=False)
    optimizer = trainer.optimizer
    assert isinstance(optimizer, Switching)
    turns = "".join(optimizer.turns)
    assert turns == "T" + "sz" * 4 + "ET" + "sz" * 4 + "ET" * 2 + "E"
    trainer.evaluate(loader)
    assert "T" not in optimizer.turns[len(turns) :], "nobody trains any more"


@pytest.mark.parametrize("later", [True, False])
def test_what_is_unfrozen_and_in_no_optimizer_is_named(
    later: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A function of the parameters gets those that train at the start."""
    said: dict[int, str] = {}

    def thaw_and_look(trainer: Trainer) -> None:
        said[trainer.state.step] = capsys.readouterr().out
        thaw(trainer.bare, trainer.state.step)

    trainer = made(adamw, frozen=True, later=later, on_step_end=thaw_and_look)
    trainer.train(DataLoader(data(), BATCH), epochs=1)
    warned = [step for step, text in said.items() if "which no optimizer holds" in text]
    assert len(warned) == later, said
    if later:
        assert "a hook has unfrozen 2.weight, 2.bias, which no optimizer" in said[warned[0]]


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


def test_what_earlier_versions_said_of_tensors_is_read() -> None:
    """They left torch's name out of the dtype's."""
    earlier: dict[str, Any] = {"forms": {"w.step": ["float32", [], "cpu", None, None]}}
    (form,) = optimizer_state.forms_of(earlier).values()
    assert form == optimizer_state.form_of(torch.zeros(()), None)
    assert optimizer_state.forms_of({"forms": {"w": form}}) == {"w": form}
