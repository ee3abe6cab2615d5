"""What ranks do in the tests of what a program keeps beside its model."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune
from torch.utils.data import DataLoader

from orchestrator import Trainer
from orchestrator.engine.saving.writer import Writer
from tests.engine.programs.basics import (
    Net,
    message,
    net,
    optimizer,
    samples,
    world,
)

SAVED, PLACE = 4, "STEPS_OF_THIS_LIFE"


class Counting(Net):
    """Counts its calls beside its parameters and buffers, as modules can."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = torch.cat([self.calls, torch.ones(1)])
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Unreadable(Net):
    def get_extra_state(self) -> Any:
        return lambda: None


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
    model, own, steps = Counting(), Curriculum(), int(os.environ[PLACE])
    log: dict[str, Any] = {"steps": 0, "names": ("a", b"b"), "last": (0.0, 0.0)}

    def after_step(trainer: Trainer) -> None:
        own.level += 1
        own.seen += 2
        log["steps"] += 1
        log["last"] = (float(log["steps"]),) * 2
        for name, weight in trainer.bare.named_parameters():
            average[name].lerp_(weight.detach(), 0.1)

    strategy = "hybrid_shard" if world() > 1 else "none"
    in_memory = "ORCHESTRATOR_RESUME_DIR" in os.environ
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
    told.append(len(model.calls))
    (directory / f"kept_{trainer.ranks.rank}").write_text(json.dumps([told, whole]))


class Growing(Net):
    """Has a buffer that grows, one that comes in the first forward, and one nobody knows of."""

    bank: Tensor
    mean: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, 3))
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if self.mean is None:
                self.mean = torch.zeros(3)
            if not hasattr(self, "late"):
                self.register_buffer("late", torch.ones(2))
            self.bank = torch.cat([self.bank, torch.full((1, 3), len(self.bank) / 10)])
            self.mean = self.mean * 0.5 + self.bank[-1]
        out = super().forward(x)
        return out if self.mean is None else out + self.mean * torch.arange(3) + self.bank.sum(0)


def growing(directory: Path) -> None:
    """Train with buffers that change their shape; write down what came of it."""
    torch.manual_seed(0)
    model = Growing()
    in_memory = "ORCHESTRATOR_RESUME_DIR" in os.environ
    config = {"checkpoint": {"memory_every": 1}} if in_memory else {}
    trainer = Trainer(
        model, optimizer(model), torch.nn.CrossEntropyLoss(), strategy=os.environ["STRATEGY"],
        config=config,
    )  # fmt: skip
    saved: dict[str, Any] = {"save_to": directory.parent / "saved", "save_every": "1 steps"}
    more = {} if in_memory else {**saved, "resume": True}
    trainer.train(DataLoader(samples(), 8 // world()), max_period=f"{os.environ[PLACE]} steps",
                  **more)  # fmt: skip
    bare = trainer.bare
    values = whole_values([*bare.named_parameters(), *bare.named_buffers()])
    (directory / f"kept_{trainer.ranks.rank}").write_text(json.dumps([[], values]))


def saved_by_a_late_rank(directory: Path) -> None:
    """Save frozen weights where rank 1 takes longer to look at its file than rank 0 to publish."""
    model = net()
    next(model.parameters()).requires_grad_(False)
    trainer = Trainer(model, optimizer(model), torch.nn.CrossEntropyLoss(), strategy="full_shard")
    in_time = Writer.identities

    def late(writer: Writer) -> Any:
        step = re.fullmatch(r"\.(step_\d+)\..*", writer.directory.name)
        assert step is not None
        final, end = writer.directory.parent / step[1], time.monotonic() + 1.0
        while trainer.ranks.rank == 1 and not final.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return in_time(writer)

    with mock.patch.object(Writer, "identities", late):
        trainer.train(DataLoader(samples(), 8), max_period="2 steps", save_to=directory / "saved",
                      save_every="1 steps")  # fmt: skip


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
    trainer.train(DataLoader(samples(), 8 // world()), max_period=f"{os.environ[PLACE]} steps",
                  save_to=directory.parent / "saved", save_every="2 steps",
                  resume=True)  # fmt: skip
    values = whole_values([*trainer.bare.named_parameters(), ("centre", loss.centre)])
    (directory / f"kept_{trainer.ranks.rank}").write_text(json.dumps([[], values]))


def thawing(directory: Path) -> None:
    """Train with a hook that unfreezes a part and freezes another; write down what came of it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Net(), torch.nn.Dropout(0.5), torch.nn.Linear(3, 3))
    model[0].requires_grad_(False)
    parameters = [*model.parameters()]

    def after_step(trainer: Trainer) -> None:
        if trainer.state.step == SAVED - 1:
            trainer.bare[0].requires_grad_(True)
            trainer.bare[2].requires_grad_(False)
            trainer.bare[1].eval()

    trainer = Trainer(
        model, torch.optim.AdamW(parameters), torch.nn.CrossEntropyLoss(),
        strategy=os.environ["STRATEGY"], on_step_end=after_step,
        find_unused_parameters=os.environ["STRATEGY"] == "ddp",
    )  # fmt: skip
    trainer.train(DataLoader(samples(), 8 // world()), max_period=f"{os.environ[PLACE]} steps",
                  save_to=directory.parent / "saved", save_every="2 steps",
                  resume=True)  # fmt: skip
    trains = [weight.requires_grad for weight in trainer.bare.parameters()]
    modes = [module.training for module in trainer.bare.modules()]
    values = whole_values(trainer.bare.named_parameters())
    told = [trains, modes]
    (directory / f"kept_{trainer.ranks.rank}").write_text(json.dumps([told, values]))


def pruned(directory: Path) -> None:
    """Train with weights that a hook makes into others, and with a dict that grows."""
    model, log = net(), {"mean": torch.zeros(2)}
    first = next(name for name, inner in model.named_modules() if hasattr(inner, "weight"))

    def after_step(trainer: Trainer) -> None:
        if trainer.state.step == 2:
            prune.l1_unstructured(trainer.bare.get_submodule(first), "weight", 0.5)
            log["late"] = torch.zeros(1)

    trainer = Trainer(model, optimizer(model), torch.nn.CrossEntropyLoss(), on_step_end=after_step)
    trainer.keep("log", log)
    trainer.train(DataLoader(samples(), 8), max_period="4 steps", save_to=directory / "saved",
                  save_every="1 steps")  # fmt: skip


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
    Trainer(Unreadable(), torch.optim.SGD, torch.nn.CrossEntropyLoss())  # is trained as it is
    (directory / "said").write_text(json.dumps(said))
