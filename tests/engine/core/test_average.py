"""The average of the weights is torch's own, on every layout, and is evaluated in their place."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from orchestrator import Trainer
from orchestrator.common.errors import UsageError
from orchestrator.engine.export import export_weights
from tests.engine import pair
from tests.engine.by_hand import (
    BATCH,
    FIRST,
    LATER,
    NONE,
    STEPS,
    adamw,
    data,
    far,
    made,
    momentum,
    net,
    whole,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_groups_left")]

DECAY = 0.9
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "full_shard": {"strategy": "full_shard"},
    "copies": {"strategy": "hybrid_shard", "config": {"fsdp": {"shard_size": 1}}},
}


def by_torch(make: Any, model: nn.Module, poisoned: slice = NONE) -> nn.Module:
    """Return torch's own average after a loop by hand."""
    optimizer = make(model.parameters())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for x, y in DataLoader(data(poisoned), BATCH):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        if loss.isfinite():
            optimizer.step()
            average.update_parameters(model)
    return average.module.eval()


def averaged(trainer: Trainer) -> dict[str, Tensor]:
    """Return the whole averaged weights on every rank."""
    with trainer.parts.steppers.evaluating():
        return {name: weight.detach().clone() for name, weight in whole(trainer).items()}


def trained(
    trainer: Trainer, poisoned: slice = NONE, *, verbose: bool = False, **more: Any
) -> dict[str, Tensor]:
    batch = BATCH // (trainer.ranks.world * trainer.parts.config.training.gradient_accumulation)
    trainer.train(DataLoader(data(poisoned), batch), epochs=1, verbose=verbose, **more)
    return averaged(trainer)


# Fused and not, and with a step that is skipped.
KINDS: list[tuple[Any, slice]] = [
    (adamw, LATER),
    (lambda parameters: AdamW(parameters, lr=1e-2, fused=False), NONE),
    (momentum, FIRST),
]


def apart(kind: tuple[Any, slice], **more: Any) -> float:
    """Compare with torch's average."""
    make, poisoned = kind
    trainer = made(make, ema=DECAY, **more)
    own = trained(trainer, poisoned)
    assert far(own, whole(trainer)) > 1e-3, "the weights are other ones"
    return far(own, dict(by_torch(make, net(), poisoned).named_parameters()))


def test_ema_equals_torchs_average() -> None:
    assert max(apart(kind, accumulate=number) for kind in KINDS for number in (1, 4)) < 2e-6


def test_ema_equals_torchs_average_on_two_ranks(tmp_path: Path) -> None:
    said = pair.run(average_on_two_ranks, tmp_path)
    assert said.count("equal") == 2, said


def average_on_two_ranks(rank: int, directory: Path) -> None:
    wrong = {}
    for kind, (name, more) in zip(KINDS, LAYOUTS.items(), strict=True):
        if (distance := apart(kind, accumulate=2, **more)) > 2e-6:
            wrong[name] = distance
    for name in ("full_shard", "copies"):
        wrong |= goes_on(directory / name, **LAYOUTS[name])
    print(wrong or "equal", flush=True)


def goes_on(place: Path, **more: Any) -> dict[str, float]:
    """Train half, and the rest from a checkpoint: to the bit."""
    at_once = trained(made(adamw, ema=DECAY, **more))
    saved = {"save_to": place, "save_every": "4 steps"}
    trained(made(adamw, ema=DECAY, **more), max_period="4 steps", **saved)
    again = trained(made(adamw, ema=DECAY, **more), resume=True, **saved)
    return {f"resumed, {more}": distance} if (distance := far(again, at_once)) else {}


# -- where it is seen ------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = net(), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.inner(x))
        return out


def test_ema_is_evaluated_saved_and_exported_with_buffers(tmp_path: Path) -> None:
    expected = by_torch(momentum, Normed())
    x, y = data().tensors
    losses = []

    def note(trainer: Trainer) -> None:
        losses.append(trainer.state.val_metrics["loss"])

    model = Normed()
    trainer = Trainer(
        model, momentum(model.parameters()), functional.mse_loss, ema=DECAY, on_epoch_end=note
    )
    loader = DataLoader(data(), BATCH)
    trainer.train(loader, loader, epochs=1, verbose=False, save_to=tmp_path / "saved")
    wanted = functional.mse_loss(expected(x), y).item()
    assert losses == [pytest.approx(wanted, abs=1e-6)]
    assert trainer.evaluate(loader)["loss"] == losses[0]
    torch.testing.assert_close(trainer.state_dict(), expected.state_dict())
    raw = trainer.state_dict(ema=False)
    assert far(whole(trainer), raw) == 0
    assert far(raw, trainer.state_dict()) > 1e-3
    trainer.save(tmp_path / "model.pt")
    torch.testing.assert_close(torch.load(tmp_path / "model.pt"), expected.state_dict())
    plain = exported(tmp_path, "plain.safetensors")
    torch.testing.assert_close(plain, raw)
    average = exported(tmp_path, "average.safetensors", ema=True)
    torch.testing.assert_close(average, trainer.state_dict())


def exported(place: Path, name: str, **more: Any) -> dict[str, Tensor]:
    export_weights(place / "saved" / f"step_{STEPS:08d}", place / name, **more)
    model = Normed()
    trainer = Trainer(model, adamw(model.parameters()), functional.mse_loss, weights=place / name)
    return trainer.state_dict()


class Failing:
    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return self.batches()


def test_failed_evaluation_leaves_weights_unchanged() -> None:
    trainer = made(adamw, ema=DECAY)
    trained(trainer)
    before = {name: weight.detach().clone() for name, weight in whole(trainer).items()}
    average = averaged(trainer)

    def fails() -> Any:
        assert far(whole(trainer), average) == 0
        raise ZeroDivisionError
        yield

    with pytest.raises(ZeroDivisionError):
        trainer.evaluate(Failing(fails))
    assert far(whole(trainer), before) == 0
    assert far(averaged(trainer), average) == 0


def test_resume_reports_missing_or_unused_average(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that begins later begins with the weights that it goes on from."""
    saved = {"save_to": tmp_path / "saved", "save_every": "4 steps"}
    trained(made(adamw), max_period="4 steps", **saved)
    trainer = made(adamw, ema=DECAY)
    trained(trainer, resume=True, max_period="4 steps", save_to=tmp_path / "saved", verbose=True)
    assert "nothing of 'ema' was saved there" in capsys.readouterr().out
    assert far(averaged(trainer), whole(trainer)) == 0
    loader = DataLoader(data(), BATCH)
    trainer.train(loader, epochs=1, **saved)
    made(adamw).load_checkpoint(tmp_path / "saved")
    assert "'ema' was kept there, and this program keeps none" in capsys.readouterr().out


def test_invalid_average_is_refused() -> None:
    with pytest.raises(UsageError, match=r"training.ema is 1; it must be above 0 and below 1"):
        made(adamw, ema=1.0)
    with pytest.raises(UsageError, match=r"training.ema is 0; it must be above 0"):
        made(adamw, ema=0.0)
    with pytest.raises(UsageError, match=r"this Trainer has none"):
        made(adamw).state_dict(ema=True)
