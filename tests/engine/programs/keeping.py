"""Rank functions of the tests of extra state that a program saves beside its model."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from orchestrator import Trainer
from tests.engine.programs.basics import (
    message,
    net,
    optimizer,
    samples,
    world,
)

SAVED, PLACE = 4, "STEPS_OF_THIS_LIFE"


class Curriculum:
    def __init__(self) -> None:
        self.level, self.seen = 0, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level, "seen": self.seen.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level, self.seen = state["level"], state["seen"] + 0


def whole_values(named: Iterable[tuple[str, Tensor]]) -> dict[str, list[float]]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).flatten().tolist()
        for name, value in named
    }


def keeping(directory: Path) -> None:
    """Train with an average of the weights, counters and an object; write down what came of it."""
    torch.manual_seed(0)
    model, own, steps = net(), Curriculum(), int(os.environ[PLACE])
    log: dict[str, Any] = {"steps": 0, "names": ("a", b"b"), "last": (0.0, 0.0)}

    def after_step(trainer: Trainer) -> None:
        own.level += 1
        own.seen += 2
        log["steps"] += 1
        log["last"] = (float(log["steps"]),) * 2
        for name, weight in trainer.bare.named_parameters():
            average[name].lerp_(weight.detach(), 0.1)

    strategy = "hybrid_shard" if world() > 1 else "none"
    in_memory = "ORCHESTRATOR_MEMORY_DIR" in os.environ
    config = {"checkpoint": {"memory_every": 1}} if in_memory else {}
    trainer = Trainer(
        model, optimizer(model), torch.nn.CrossEntropyLoss(), strategy=strategy,
        on_step_end=after_step, config=config,
    )  # fmt: skip
    average = {name: w.detach().clone() for name, w in trainer.bare.named_parameters()}
    for name, holder in (("average", average), ("own", own), ("log", log)):
        trainer.keep(name, holder)
    loader = DataLoader(samples(), 8 // world())
    saved: dict[str, Any] = {"save_to": directory.parent / "saved", "save_every": "2 steps"}
    more = {} if in_memory else {**saved, "resume": True}
    trainer.train(loader, max_period=f"{steps} steps", **more)
    whole = whole_values(average.items())
    told = [own.level, own.seen.tolist(), log["steps"], repr(log["names"]), list(log["last"])]
    (directory / f"kept_{trainer.ranks.rank}").write_text(json.dumps([told, whole]))


class Centred(torch.nn.Module):
    """A loss with a centre that moves, as DINO's."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            self.centre.lerp_(torch.full((3,), float(targets.sum())), 0.1)
        return torch.nn.functional.cross_entropy(outputs - self.centre, targets)


def centring(directory: Path) -> None:
    """Train with a loss that changes; write down what came of it."""
    torch.manual_seed(0)
    model, loss = net(), Centred()
    trainer = Trainer(model, optimizer(model), loss, strategy=os.environ["STRATEGY"])
    trainer.keep("centre", loss)
    trainer.train(DataLoader(samples(), 8 // world()), max_period=f"{os.environ[PLACE]} steps",
                  save_to=directory.parent / "saved", save_every="2 steps",
                  resume=True)  # fmt: skip
    values = whole_values([*trainer.bare.named_parameters(), ("centre", loss.centre)])
    (directory / f"kept_{trainer.ranks.rank}").write_text(json.dumps([[], values]))


def refusals(directory: Path) -> None:
    model = net()
    trainer = Trainer(model, optimizer(model), torch.nn.CrossEntropyLoss())
    trainer.keep("counts", {"steps": 0})
    step = trainer.save_checkpoint(directory / "saved")
    said = [
        message(trainer.keep, "counts", {"steps": 0}),
        message(trainer.keep, "average", {}),
        message(trainer.keep, "number", 3),
        message(trainer.keep, "plain", {"x": frozenset({1})}),
    ]
    for content in ({"steps": 0, "more": torch.zeros(1)}, None):
        model = net()
        other = Trainer(model, optimizer(model), torch.nn.CrossEntropyLoss())
        if content is None:
            other.keep("average", {"steps": 0})
        else:
            other.keep("counts", content)
        said.append(message(other.load_checkpoint, step))
    (directory / "said").write_text(json.dumps(said))
