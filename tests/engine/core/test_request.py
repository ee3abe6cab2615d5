"""Each argument does what it says, alone and beside others, or is refused by its name."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from orchestrator import Trainer
from orchestrator.common.errors import OrchestratorError, UsageError
from orchestrator.config import parse
from orchestrator.config.schema import Config
from orchestrator.engine.core import settings
from orchestrator.engine.core.stopping import TrainingRequest

pytestmark = pytest.mark.usefixtures("no_groups_left")
NOTHING = dict.fromkeys(
    ("epochs", "min_period", "max_period", "save_every", "best", "patience", "save_to", "keep")
)
BEST = {"best": "min val_loss"}
DIR = {"save_to": "here"}


def asked(keys: dict[str, Any] | None = None, **more: Any) -> TrainingRequest:
    sections = {"checkpoint": keys or {}} if "training" not in (keys or {}) else keys or {}
    config = parse.build_dataclass(
        Config, {"training": {"max_steps": settings.UNENDING}} | sections
    )
    if "training" in sections:
        training = {"max_steps": settings.UNENDING, **sections["training"]}
        config = parse.build_dataclass(Config, {"training": training})
    arguments: dict[str, Any] = {**NOTHING, "resume": False, "epochs": 1, **more}
    return settings.request_of(config, sections, **arguments)


@pytest.mark.parametrize(
    ("keys", "more", "said"),
    [
        ({}, {"epochs": None}, "train() has no end"),
        ({}, {"epochs": None, "min_period": "2 epochs"}, "train() has no end"),
        ({}, {"patience": 2}, "no metric is named"),
        ({"training": {"patience": 2}}, {}, "no metric is named"),
        ({}, {"best": "val_loss"}, "it must be min or max"),
        ({}, {"keep": 2}, "keep=2 says how many checkpoints stay, but none is saved"),
        ({}, {"save_every": "100"}, "save_every is '100'"),
    ],
)
def test_train_refuses_argument_without_effect(
    keys: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError) as error:
        asked(keys, **more)
    assert said in str(error.value)
    assert error.value.fix


@pytest.mark.parametrize(
    ("keys", "more", "saves", "at_end"),
    [
        ({}, {}, False, False),
        ({}, {"resume": True}, False, False),
        ({"resume": "auto"}, {}, False, False),
        # This also holds for save_checkpoint().
        ({"copies": 2}, {}, False, False),
        ({}, DIR, True, True),
        ({"directory": "here"}, {}, True, True),
        ({}, {"save_every": "1 epoch"}, True, True),
        ({"steps": 5}, {}, True, True),
        ({}, BEST, True, True),
        ({"best": "min val_loss"}, {}, True, True),
        ({"at_end": True}, {}, True, True),
        ({"at_end": True, "keep": 2}, {}, True, True),
        ({"at_end": False}, {**DIR, **BEST}, True, False),
        ({"at_end": False}, {"save_every": "1 epoch"}, True, False),
        ({"directory": "here", "keep": 1, "asynchronous": False}, {}, True, True),
    ],
)
def test_place_time_or_metric_turns_saving_on(
    keys: dict[str, Any], more: dict[str, Any], saves: bool, at_end: bool
) -> None:
    found = asked(keys, **more)
    assert (found.saves, found.at_end) == (saves, at_end)


def test_argument_of_train_overrides_key() -> None:
    keys = {"keep": 2, "best": "min val_loss", "directory": "there"}
    found = asked(keys, keep=5, best="max val_accuracy", save_to="here", patience=1)
    assert (found.keep, found.best, found.directory) == (5, "max val_accuracy", "here")
    assert (asked(keys).keep, asked(keys).directory) == (2, "there")


# -- of the Trainer itself ------------------------------------------------------------------------


def made(**more: Any) -> Trainer:
    model = more.pop("model", None) or nn.Linear(2, 1)
    optimizer = more.pop("optimizer", torch.optim.SGD)
    more = more if "step" in more else {"loss": nn.MSELoss(), **more}
    return Trainer(model, optimizer, **more)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"strategy": "ddp", "config": {"fsdp": {"shard_size": 2}}}, "nothing reads it while"),
        ({"strategy": "full_shard", "config": {"distributed": {"static_graph": True}}}, "nothing"),
        ({"config": {"training": {"gradient_accumulation": 4}}}, "a Trainer does not read"),
        ({"schedulers": {}}, "models= and optimizers= go together"),
        ({"metrics": {"a": max}, "step": max}, "metrics= needs loss="),
        ({"loss": nn.MSELoss(), "step": max}, "either loss= or step="),
    ],
)
def test_trainer_refuses_argument_without_effect(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        made(**more)
    assert said in str(error.value)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from zip(torch.ones(4, 2), torch.ones(4, 1), strict=True)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda t, data: t.train(data, epochs=1, patience=0), "is 0; it must be at least 1"),
        (lambda t, data: t.train(epochs=1), "train() has no data"),
        (lambda t, data: t.save("w.pt", model="G"), "there is one, without a name"),
        (lambda t, data: t.state_dict(ema=True), "this Trainer has none"),
        (lambda t, data: t.evaluate(3), "loader is a int"),
    ],
)
def test_train_refuses_invalid_argument(call: Any, said: str) -> None:
    data = DataLoader(TensorDataset(torch.ones(4, 2), torch.ones(4, 1)), 2)
    with pytest.raises(OrchestratorError) as error:
        call(made(), data)
    assert said in str(error.value)


def test_own_stream_may_accompany_dealt_data() -> None:
    trainer = made(stream="own")
    dealt = DataLoader(TensorDataset(torch.ones(4, 2), torch.ones(4, 1)), 2)
    trainer.train(DataLoader(Stream(), 2), dealt, epochs=1, verbose=False)
    assert trainer.state.step == 2
