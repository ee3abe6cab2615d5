"""Several models and optimizers train as by hand in every layout, or are refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from orchestrator import Trainer
from orchestrator.common.errors import CheckFailed, OrchestratorError
from tests.engine import pair
from tests.engine.by_hand import far
from tests.engine.programs.several import (
    BATCH,
    STEPS,
    Net,
    by_hand,
    data,
    lazily,
    made,
    models,
    optimizers,
    poisoned,
    step,
    trained,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_groups_left")]

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "full_shard": {"strategy": "full_shard"},
    "whole": {"strategy": "full_shard", "config": {"fsdp": {"accumulate": "whole"}}},
    "others": {"strategy": "ddp", "find_unused_parameters": True},
    "copies": {"strategy": "hybrid_shard", "config": {"fsdp": {"shard_size": 1}}},
}
# Where a step of one optimizer is left out as well.
WITHOUT = ("one", "ddp", "full_shard")


def apart(layouts: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Compare with the loop by hand: the steps of one optimizer are seldom, or left out once."""
    found = {}
    seldom, without = by_hand(every=3), by_hand(poisoned, marked=True)
    for name, more in layouts.items():
        own = trained(made(lazily, every={"G": 3}, accumulate=2, **more))
        found[f"{name}, in two, seldom"] = far(own, seldom)
        if name in WITHOUT:
            found[f"{name}, poisoned"] = far(trained(made(poisoned, **more), marked=True), without)
    return {name: distance for name, distance in found.items() if not distance < 1e-6}


def test_several_optimizers_train_as_plain_loop() -> None:
    assert apart({"one": {}}) == {}
    assert far(trained(made()), by_hand()) < 1e-6


def test_several_optimizers_resume_exactly_on_two_ranks(tmp_path: Path) -> None:
    said = pair.run(train_on_two_ranks, tmp_path)
    assert said.count("equal") == 2, said


def train_on_two_ranks(rank: int, directory: Path) -> None:
    wrong = apart(LAYOUTS)
    for name in ("full_shard", "copies"):
        more, saved = LAYOUTS[name], {"save_to": directory / name, "save_every": "4 steps"}
        more |= {"ema": {"G": 0.9}, "every": {"G": 3}}
        at_once = trained(made(**more))
        trained(made(**more), max_period="4 steps", **saved)
        again = made(**more)
        if distance := far(trained(again, resume=True, **saved), at_once):
            wrong[f"{name}, resumed"] = distance
    print(wrong or "equal", flush=True)


def test_optimizer_with_interval_computes_loss_only_in_its_steps(tmp_path: Path) -> None:
    trainer, asked = made(lazily, every={"G": 3}, log_every=1), vars(lazily)
    asked["asked"] = []
    rates: list[float] = []
    trainer.optimizers["G"].register_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    trained(trainer)
    assert len(asked["asked"]) == STEPS // 3 == len(rates)
    assert rates == [1e-2] * 2, "its scheduler steps with it: in every third of its own steps"
    asked["asked"] = []
    assert {"loss_G", "fooled"} <= trainer.evaluate(DataLoader(data(), BATCH)).keys()
    assert len(asked["asked"]) == STEPS, "an evaluation asks for all"


def test_epoch_without_step_of_an_optimizer_keeps_its_scheduler() -> None:
    """Its scheduler counts epochs; one that looks at the loss has none to look at."""
    seldom = {"every": {"G": STEPS + 1}, "scheduler_every": "epoch"}
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    for schedule, rate in ((lambda o: StepLR(o, 1, 0.5), 0.5e-2), (plateau, 1e-2)):
        trainer = made(schedulers=dict.fromkeys(models(), schedule), **seldom)
        trained(trainer)
        assert trainer.optimizers["G"].param_groups[0]["lr"] == rate


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
def test_skipped_first_step_gives_no_scheduler_warning() -> None:
    trained(made(poisoned), marked=True)


# -- other programs --------------------------------------------------------------------------------


def test_teacher_without_optimizer_stays_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    def distil(models: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            wanted = models["teacher"](batch[0])
        return functional.mse_loss(models["student"](batch[0]), wanted)

    torch.manual_seed(0)
    student, teacher = Net(6, 2), Net(6, 2)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    trainer = Trainer(
        models={"student": student, "teacher": teacher.eval()},
        optimizers={"own": Adam(student.parameters(), lr=1e-2)},
        step=distil,
    )
    loader = DataLoader(data(), BATCH)
    first = trainer.evaluate(loader)["loss_own"]
    trainer.train(loader, loader, epochs=2, best="min val_loss_own", save_to=tmp_path / "saved")
    assert trainer.state.val_metrics["loss_own"] < first / 2
    assert far(dict(teacher.state_dict()), before) == 0
    assert not teacher.training
    assert "8 of 16 are not in the optimizer" in capsys.readouterr().out


def test_function_makes_optimizer_of_model_by_name() -> None:
    later = made(optimizers={"D": optimizers_of("D"), "G": optimizers_of("G")})
    assert far(trained(later), by_hand()) < 1e-6
    named = trained(later)
    assert far(later.state_dict(model="G"), later.models["G"].state_dict()) == 0
    assert named.keys() == later.state_dict().keys()


def optimizers_of(name: str) -> Callable[[Any], Any]:
    kinds: dict[str, Callable[[Any], Any]] = {
        "D": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
        "G": lambda parameters: Adam(parameters, lr=1e-2),
    }
    return kinds[name]


# -- what a user may mistake -----------------------------------------------------------------------


G, D = models().values()
SHARED = Adam([*G.parameters(), *D.parameters()])
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no models": ({"models": None}, r"models= and optimizers= go together"),
    "no optimizers": ({"optimizers": None}, r"models= and optimizers= go together"),
    "a model as well": ({"model": G}, r"models= and optimizers= go together"),
    "no optimizer": ({"optimizers": {"g": SGD}}, r"by the name of a model, .*\(there are G, D\)"),
    "shared": ({"optimizers": {"G": SHARED, "D": SGD(D.parameters())}},
               r"D\.first\.weight is in two optimizers, 'G' and 'D'"),
    "scheduler": ({"schedulers": {"g": None}}, r"schedulers= has 'g', and no optimizer.*'G'"),
    "clipping": ({"clip_grad_norm": {"g": 1.0}}, r"clip_grad_norm= has 'g'"),
    "ema": ({"ema": {"H": 0.9}}, r"ema= has 'H'"),
    "every": ({"every": {"H": 2}}, r"every= has 'H'"),
    "every all": ({"every": {"G": 2, "D": 2}}, r"steps in which no optimizer steps"),
    "dp": ({"strategy": "dp"}, r"strategy=\"dp\" is for one model, and here are several"),
    "no step": ({"step": None, "loss": functional.mse_loss}, r"models= needs step="),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_inconsistent_arguments_are_refused(name: str) -> None:
    changes, message = MISTAKES[name]
    of = {"G": G, "D": D}
    given = {"models": of, "optimizers": optimizers(of), "step": step, **changes}
    with pytest.raises(OrchestratorError, match=message):
        Trainer(given.pop("model", None), **given)


LOSSES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "wrong name": (lambda d: {"G": d["G"], "d": d["D"]}, r"a loss of 'd', and no .*'D'"),
    "one more": (lambda d: {**d, "H": d["G"]}, r"a loss of 'H', and no optimizer"),
    "missing": (lambda d: {"G": d["G"]}, r"gives no loss of 'D', which is an optimizer"),
    "no dict": (lambda d: d["G"], r"the step gave .*, where each optimizer needs a loss"),
    "text": (lambda d: {**d, "D": "1.0"}, r"the step's loss of 'D' gave"),
    "metrics": (lambda d: {name: (loss, 1, {"same": loss}) for name, loss in d.items()},
                r"the metric 'same' twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_step_with_unexpected_losses_is_refused(name: str) -> None:
    change, message = LOSSES[name]
    trainer = made(lambda models, batch: change(step(models, batch)))
    with pytest.raises(OrchestratorError, match=message):
        trained(trainer)
    assert trainer.state.step <= 1


def test_checkpoint_of_other_optimizers_is_refused(tmp_path: Path) -> None:
    trained(made(), save_to=tmp_path / "saved")
    of = models()
    other = {"G": SGD([*of["G"].parameters(), *of["D"].parameters()], lr=0.1)}
    trainer = Trainer(models=of, optimizers=other, step=step)
    with pytest.raises(CheckFailed, match=r"other optimizers .*: D, G there, G here"):
        trainer.load_checkpoint(tmp_path / "saved")
    single = Trainer(nn.ModuleDict(models()), lambda p: SGD(p, lr=0.1), step=step)
    with pytest.raises(CheckFailed, match=r"D, G there, one here"):
        single.load_checkpoint(tmp_path / "saved")
