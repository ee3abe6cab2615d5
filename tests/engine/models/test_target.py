"""Names of the user's own functions: found, or told in words what is wrong with them."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.config import parse
from orchestrator.config.schema import Config
from orchestrator.engine.data import sources
from orchestrator.engine.models import build
from orchestrator.engine.models.losses import as_sums
from tests.engine.data.test_data import feed

OWN = """
import torch
from torch import nn

def build(size, bias=True):
    return nn.Linear(size, 2, bias=bias)

def words():
    return ["not", "a", "model"]

class Auto:
    @classmethod
    def from_pretrained(cls, path, **more):
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, len(path))
        return model

def broken():
    raise KeyError("theirs")

def loss(model, batch):
    return model(batch).sum(), len(batch)

number = 3
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "models.py").write_text(OWN)
    (tmp_path / "mine" / "needs.py").write_text("import not_installed_here\n")
    for name in ("mine", "mine.models", "mine.needs"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def config(name: str = "mine.models:build", **args: Any) -> Config:
    model = {"target": name, "args": args}
    return parse.build_dataclass(Config, {"model": model, "training": {"seed": 4}})


def test_target_model_is_built_with_seed() -> None:
    torch.manual_seed(4)
    expected = nn.Linear(3, 2, bias=False)
    made = build.build_model(config(size=3, bias=False))
    assert isinstance(made, nn.Linear) and made.bias is None
    assert torch.equal(made.weight, expected.weight)
    # The model keeps its own values.
    assert not build.is_built_in(made)
    assert build.flops_per_sample(config(size=3), made) is None


@pytest.mark.parametrize("results", [12, lambda: 12.0])
def test_target_model_may_report_flops(results: Any) -> None:
    made = build.build_model(config(size=3))
    made.flops_per_sample = results  # type: ignore[assignment]
    assert build.flops_per_sample(config(size=3), made) == 12.0


WRONG = {
    "mine.models": ("must be package.module:function", "such as"),
    "mine.models:": ("must be package.module:function", "such as"),
    "mine.modles:build": ("there is no module 'mine.modles'", "looked in"),
    "nowhere.models:build": ("there is no module 'nowhere'", "looked in"),
    "mine.models:biuld": ("defines no 'biuld'; did you mean 'build'?", ""),
    "mine.models:Auto.from_pretraind": ("did you mean 'from_pretrained'?", ""),
    "mine.models:number": ("'number' is an int: it cannot be called", ""),
    "mine.models:words": ("which returned a list, not a torch.nn.Module", ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_unresolvable_target_is_explained(name: str) -> None:
    what, fix = WRONG[name]
    with pytest.raises(UsageError) as error:
        build.build_model(config(name))
    assert f"model.target is '{name}'" in error.value.what
    assert what in error.value.what
    assert fix in error.value.fix


def test_errors_of_user_code_pass_through() -> None:
    with pytest.raises(KeyError, match="theirs"):
        build.build_model(config("mine.models:broken"))
    with pytest.raises(ModuleNotFoundError, match="not_installed_here"):
        build.build_model(config("mine.needs:build"))


# -- what a model or loss function gives --------------------------------------------------------

ONE = torch.tensor(1.5)


def test_target_loss_is_called_with_model_and_batch() -> None:
    sections = {"training": {"loss": "mine.models:loss"}, "model": {"target": "mine.models:build"}}
    totals = build.loss_of(parse.build_dataclass(Config, sections))(
        nn.Linear(3, 2), torch.ones(5, 3)
    )
    _, count = totals["loss"]
    assert count == 5
    assert count.dtype == torch.int64


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (ONE, "it gave one tensor"),
        ([ONE, 1], "it gave a list"),
        ((ONE,), "it gave a tuple"),
        (None, "it gave a NoneType"),
        ((torch.ones(3), 1), "it gave a tensor of shape (3,) as the sum of its losses"),
        (("1.5", 1), "it gave a str as the sum of its losses"),
        ((ONE, "many"), "it: the count is a str, not one number"),
        ((ONE, torch.ones(2)), "it: the count is a Tensor, not one number"),
        ((ONE, 1, {"far": None}), "it: 'far' is a NoneType, not one number"),
    ],
)
def test_loss_without_sum_and_count_is_explained(given: Any, words: str) -> None:
    with pytest.raises(CheckFailed) as error:
        as_sums(given, "it")
    assert error.value.what.startswith(words)
    assert "Return (loss_sum, count)" in error.value.fix
    assert "Means of batches that hold unequally many" in error.value.fix


def test_extra_metrics_need_names() -> None:
    with pytest.raises(CheckFailed, match="it gave a list after the sum and the count"):
        as_sums((ONE, 1, [ONE]), "it")
    for taken in ("loss", "count"):
        with pytest.raises(UsageError, match=f"it has a metric named '{taken}', which is taken"):
            as_sums((ONE, 1, {taken: ONE}), "it")


@pytest.mark.slow
def test_documented_example_trains(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "own_model.md").read_text()
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL))
    (tmp_path / "my_model.py").write_text(blocks["python"])
    wanted = parse.build_dataclass(Config, yaml.safe_load(blocks["yaml"]))
    model, loss = build.build_model(wanted), build.loss_of(wanted)
    source, held_out = sources.load_sources(wanted)
    assert held_out is not None
    optimizer = torch.optim.AdamW(model.parameters(), wanted.optimizer.lr)

    def evaluated() -> float:
        found = [loss(model, b.data) for b in feed(held_out, wanted, held=True)]
        assert sum(int(totals["loss"][1]) for totals in found) == 500
        return sum(totals["loss"][0].item() for totals in found) / 500

    before = evaluated()
    training = feed(source, wanted)
    for _ in range(wanted.training.max_steps):
        totals = loss(model, next(training).data)
        total, count = totals["loss"]
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert evaluated() < 0.7 * before
    assert set(totals) == {"loss", "far"}
