"""Rank functions of the tests of the Trainer; worlds.py passes the job's directory."""

import json
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from orchestrator import Trainer, distributed
from orchestrator.engine.observe import trackers as engine_trackers
from orchestrator.trackers import known as sending
from orchestrator.trackers.known import KNOWN, Known
from tests.engine.programs.basics import (
    ACCUMULATE,
    BATCH,
    CLIP,
    EPOCHS,
    MORE,
    RANK,
    Net,
    correct,
    loader,
    message,
    net,
    optimizer,
    samples,
    shards,
    tell,
    trainer,
    warmed,
    whole,
    world,
)


def every_strategy(directory: Path) -> None:
    """Parameters and history of each, for the test to compare with a plain loop."""
    found = {}
    for strategy in (*MORE, *(("dp", "none") if world() == 1 else ())):
        # The weights of rank 0 count.
        model = net(seed=int(os.environ["RANK"]) * (strategy != "none"))
        made = Trainer(
            model,
            warmed(model),
            nn.CrossEntropyLoss(),
            metrics={"correct": correct},
            strategy=strategy,
            accumulate=ACCUMULATE,
            clip_grad_norm=CLIP,
            warmup_steps=3,
        )
        history = made.train(loader(shuffle=True), loader(13), epochs=EPOCHS)
        found[strategy] = (whole(model), history)
    if int(os.environ["RANK"]) == 0:
        torch.save(found, directory / "found")


def resumes(directory: Path) -> None:
    """A run that is interrupted in mid-epoch and resumed gives the bits of one without a break."""
    breaks = {"hybrid_shard": ("4 steps", "3 steps"), "ddp": ("4 steps",)}
    for strategy, periods in breaks.items():
        ended = []
        for stops in ((), *((period,) for period in periods)):
            for period in (*stops, None):
                model = net(dropout=0.3)
                made = Trainer(
                    model,
                    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                    nn.CrossEntropyLoss(),
                    strategy=strategy,
                    accumulate=ACCUMULATE,
                    scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.7),
                    clip_grad_norm=CLIP,
                )
                own = directory / f"{strategy}{len(ended)}"
                saved = {"save_every": "100 steps", "save_to": own, "resume": True} if stops else {}
                made.train(loader(shuffle=True), epochs=EPOCHS, max_period=period, **saved)
            ended.append((shards(model), made.state.train_metrics, made.state.step))
        for one in ended[1:]:
            assert all(map(torch.equal, one[0], ended[0][0])), strategy
            assert one[1:] == ended[0][1:], (one[1:], ended[0][1:])
        if strategy == "ddp" and dist.get_rank() == 0:
            torch.save(whole(model), directory / "ddp")
        assert made.load_checkpoint(own).name == f"step_{made.state.step:08d}"
        # The trainer reports that no epoch is left.
        made.train(loader(), epochs=1)


def goes_on_elsewhere(directory: Path) -> None:
    """Report the result of $UNTIL for a training that is saved in $KEPT, and its final weights."""
    model = net()
    made = Trainer(model, optimizer(model), nn.CrossEntropyLoss())
    saved = {"save_every": "1 epoch", "save_to": os.environ["KEPT"], "resume": True}
    own = loader(shuffle=True, batch_size=int(os.environ.get("BATCH", BATCH)) // world())
    results = message(made.train, own, epochs=EPOCHS, max_period=os.environ.get("UNTIL"), **saved)
    weights = whole(model)
    if made.ranks.rank == 0:
        torch.save((results, weights), directory / "ended")


class Mine(DistributedSampler[Any]):
    """It may draw in any order."""


def own_sampler(directory: Path) -> None:
    """$UNTIL ends an epoch in its midst; who ends it tells how often each sample was seen."""
    many = 22
    numbers = TensorDataset(torch.arange(many))
    kind = Mine if os.environ["SAMPLER"] == "Mine" else DistributedSampler
    own = DataLoader(numbers, 2, sampler=kind(numbers, world(), RANK, seed=3))

    def step(model: nn.Module, batch: list[Tensor]) -> Any:
        (drawn,) = batch
        out = model(drawn.float().view(-1, 1))
        return out.sum(), out.numel(), {f"n{i}": (drawn == i).sum() for i in range(many)}

    model = net_of_one()
    made = Trainer(model, torch.optim.SGD(model.parameters(), 0.0), step=step)
    history = made.train(own, epochs=1, max_period=os.environ.get("UNTIL"), resume=True,
                         save_every="100 steps", save_to=directory / "kept")  # fmt: skip
    if made.ranks.rank == 0 and history:
        times = [history[0][f"train_n{i}"] * many for i in range(many)]
        (directory / "times").write_text(json.dumps(times))


def net_of_one() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(1, 1)


def launched_again(directory: Path) -> None:
    """A script that resumes, beside another script of the same experiment name."""
    for day, (script, layers) in enumerate([("a.py", 6), ("b.py", 6), ("a.py", 7), ("a.py", 6)], 1):
        sys.argv[0] = f"/somewhere/{script}"
        os.environ["ORCHESTRATOR_EXPERIMENT"] = str(directory / f"mine_2026010{day}_000000")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, layers), nn.Linear(layers, 3))
        made = Trainer(model, torch.optim.SGD, nn.CrossEntropyLoss())
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", ResourceWarning)
            made.train(loader(), epochs=day, save_every="9 epochs", resume=True)
        assert not [str(each.message) for each in seen if each.category is ResourceWarning]


class Islands(nn.Module):
    """Values that bf16 cannot hold: times of a day, a table of angles, running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", torch.logspace(-4, 0, 6))
        self.named = nn.Embedding(4, 6)
        self.scale = nn.Parameter(torch.full((6,), 1.001))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.BatchNorm1d(6)) for _ in range(2)
        )
        self.turn = nn.Parameter(torch.eye(6))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.sin(x[:, :1] * self.rates) * self.scale + self.named(x[:, 1].long())
        for layer in self.layers:
            h = h + torch.tanh(layer(h)) @ self.turn
        return {"out": self.head(h)}


def low_precision(directory: Path) -> None:
    """Every strategy computes what ddp does, which is autocast around the plain model."""
    own = torch.Generator().manual_seed(1)
    seconds = torch.randint(0, 86400, (64, 1), generator=own).float()
    x = torch.cat([seconds, torch.arange(64.0)[:, None] % 4], 1)
    fit = DataLoader(TensorDataset(x, torch.sin(seconds / 7000)), 8)
    dtypes = set()

    def loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        dtypes.add(outputs["out"].dtype)
        return nn.functional.mse_loss(outputs["out"], targets)

    rank = distributed.setup_distributed()["rank"]
    for precision in ("bf16", "fp16"):
        found = {}
        for strategy in ("hybrid_shard", "ddp"):
            torch.manual_seed(0)
            model = Islands()
            made = Trainer(
                model, torch.optim.SGD(model.parameters(), 0.1), loss,
                strategy=strategy, precision=precision, accumulate=2,
            )  # fmt: skip
            made.train(fit, epochs=2, verbose=False)
            found[strategy] = whole(model)
        if rank == 0:
            torch.save(found, directory / precision)
    assert dtypes == {torch.float32}


def running_statistics(directory: Path) -> None:
    """All ranks validate one model, and save it: rank 0's, which is what an interruption leaves."""
    rank = distributed.setup_distributed()["rank"]
    for strategy in ("hybrid_shard", "ddp"):
        seen: list[Tensor] = []

        def statistics(model: nn.Module) -> Tensor:
            found = [b.double().flatten() for b in model.buffers()]
            return torch.cat(found).clone()

        def step(model: nn.Module, batch: Any, seen: list[Tensor] = seen) -> Any:
            if not model.training:
                seen.append(statistics(model))
            return nn.functional.cross_entropy(model(batch[0]), batch[1].clamp(min=0))

        def trainer() -> Trainer:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
            return Trainer(model, torch.optim.SGD, step=step, strategy=strategy)  # noqa: B023

        whole = trainer()
        whole.train(
            loader(40), loader(13), epochs=2, save_every="1 epoch", save_to=directory / strategy
        )
        validated = distributed.gather_tensors(seen[-1])
        assert all(torch.equal(validated[0], other) for other in validated)
        again = trainer()
        again.load_checkpoint(directory / strategy)
        loaded = distributed.gather_tensors(statistics(again.bare))
        assert all(torch.equal(validated[0], other) for other in loaded), (rank, strategy)


def signalled(number: int) -> None:
    """Signal the whole process group, as torchrun, scancel and a terminal do."""
    child = os.fork()
    if child == 0:
        signal.signal(number, signal.SIG_IGN)
        os.killpg(0, number)
        os._exit(0)
    os.waitpid(child, 0)


def stopped_with_workers(directory: Path) -> None:
    """The group gets a signal while workers load: what was trained is saved."""
    os.setpgid(0, 0)
    calls = iter(range(100))

    def step(model: nn.Module, batch: Any) -> Any:
        if next(calls) == 3:
            signalled(signal.SIGTERM)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    model, kept = net(), directory / "kept"
    made = Trainer(model, optimizer(model), step=step)
    fit = DataLoader(samples(400), 4, num_workers=2, multiprocessing_context="fork")
    made.train(fit, epochs=1, save_every="9 epochs", save_to=kept)
    assert (made.state.ended, made.state.step < 8) == ("asked to stop", True)
    assert [path.name for path in kept.iterdir()] == [f"step_{made.state.step:08d}"]


class Stopping:
    """A validation in which a signal arrives; how many of its batches were asked for."""

    asked = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in loader(400):
            Stopping.asked += 1
            os.kill(os.getpid(), signal.SIGTERM)
            yield batch


def stopped_in_a_validation(directory: Path) -> None:
    model = net()
    made = Trainer(model, optimizer(model), nn.CrossEntropyLoss())
    made.train(loader(), Stopping(), epochs=9, save_every="9 epochs", save_to=directory / "kept")
    assert (made.state.ended, made.state.epoch, made.state.val_metrics) == ("asked to stop", 1, {})
    assert Stopping.asked < 10
    assert [path.name for path in (directory / "kept").iterdir()] == [f"step_{made.state.step:08d}"]


class Watched:
    """A validation that says that it began."""

    begun = False

    def __iter__(self) -> Iterator[Any]:
        Watched.begun = True
        return iter(loader(13))


def stops_in_a_hurry(directory: Path) -> None:
    """Asked to stop in the middle of an epoch: saved at once, and not validated."""
    calls: list[int] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    model = net()
    made = Trainer(model, optimizer(model), step=step)
    kept = directory / "kept"
    made.train(loader(), Watched(), epochs=9, save_every="9 epochs", save_to=kept)
    assert (made.state.ended, made.state.epoch, Watched.begun) == ("asked to stop", 0, False)
    assert [path.name for path in kept.iterdir()] == [f"step_{made.state.step:08d}"]
    assert made.state.step < 6


def meets_nan(directory: Path) -> None:
    """One sample of the loader is broken: one step is left out, and the sample is named."""
    data = samples(40)
    data.tensors[0][7] = torch.nan
    # AdamW has a fused kernel, Adadelta has none.
    for make in (torch.optim.AdamW, torch.optim.Adadelta):
        model = net()
        made = Trainer(model, make, nn.CrossEntropyLoss())
        fit = DataLoader(data, BATCH // world(), shuffle=True)
        (epoch,) = made.train(fit, epochs=1)
        assert torch.tensor(epoch["train_loss"]).isfinite()
        assert all(value.isfinite().all() for value in whole(model).values())
        assert made.parts.steppers.first.skipped.item() == 1


# -- loaders ----------------------------------------------------------------------------------


class Flow(IterableDataset[Tensor]):
    def __init__(self, own: bool) -> None:
        self.own = own

    def __iter__(self) -> Iterator[Tensor]:
        rank = int(os.environ["RANK"])
        for index in range(rank, 11, world()) if self.own else range(11):
            yield torch.tensor([float(index)])


# -- what is refused --------------------------------------------------------------------------


def refuses(directory: Path) -> None:
    distributed.setup_distributed()

    def trained(data: Any, **more: Any) -> None:
        model = nn.Linear(6, 3)
        made = Trainer(
            model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), **more
        )
        made.train(data, epochs=1)

    def other() -> None:
        trained_model = nn.Linear(6, 3 + int(os.environ["RANK"]))
        Trainer(trained_model, torch.optim.SGD, nn.CrossEntropyLoss())

    fit = DataLoader(samples(), 4)
    results = {
        "none": message(trained, fit, strategy="none"),
        "dp": message(trained, fit, strategy="dp"),
        "other": message(other),
        "sampler": message(
            trained, DataLoader(samples(), 4, sampler=DistributedSampler(samples(), 3, 0))
        ),
        "streams": message(trained, DataLoader(Flow(True), 2)),
        "short": message(
            trained, [[torch.zeros(2, 6), torch.zeros(2).long()]][RANK:], stream="own"
        ),
        "absent": message(
            Trainer(nn.Linear(1, 1), torch.optim.SGD, nn.MSELoss()).load_checkpoint,
            directory / "no",
        ),
        "nan": message(trained, [[torch.full((2, 6), torch.inf), torch.zeros(2).long()]] * 24),
    }
    tell(directory, results)


# -- trackers ----------------------------------------------------------------------------------


class LockTable:
    """A user's tracker that records every call with its arguments."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append(["log", values, step])

    def close(self) -> None:
        self.calls.append(["close"])


class Broken(LockTable):
    def log(self, values: dict[str, float], step: int) -> None:
        super().log(values, step)
        raise ConnectionError("no network")


def tracks(directory: Path) -> None:
    distributed.setup_distributed()
    sys.modules["wandb"] = None  # type: ignore[assignment]  # it is not installed
    results = {"missing": message(trainer, trackers=["wandb"]), "name": message(
        trainer, trackers=["tensorbord"]), "thing": message(trainer, trackers=[3])}  # fmt: skip
    wrong = trainer(trackers={"tensorboard": {"logdri": "here"}})
    results["option"] = message(wrong.train, loader(), epochs=1)
    # This is not a directory, so the second trainer's directory cannot be made.
    (directory / "a_file").touch()
    shut = trainer(trackers={"tensorboard": {"log_dir": str(directory / "a_file" / "tb")}})
    shut.train(loader(), epochs=1)
    results["shut"] = str(shut.state.step)
    shut.close()
    never = threading.Event()
    KNOWN["mlflow"] = Known(lambda _: never.wait(), "json", "mlflow")  # type: ignore[arg-type, return-value]
    engine_trackers.OPEN_SECONDS = sending.LAST_SECONDS = 0.1
    hangs = trainer(trackers=["mlflow"])
    hangs.train(loader(), epochs=1)
    results["hangs"] = str(hangs.state.step)
    hangs.close()
    book, broken = LockTable(), Broken()
    made = trainer(trackers=[book, broken], log_every=2)
    saving = {"save_every": "1 steps", "save_to": directory / "saved"}
    made.train(loader(), loader(), epochs=1, **saving)
    made.close()
    told = {"book": book.calls, "broken": broken.calls}
    tell(directory, {**results, **told})


# -- what else it promises ----------------------------------------------------------------------


class Forks(nn.Module):
    """Uses one of its halves only, another one on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.halves[int(os.environ["RANK"])](x)
        return out


def promises(directory: Path) -> None:
    fit = loader(shuffle=True)
    rank = distributed.setup_distributed()["rank"]

    # Low precision learns the same to its own precision.
    for precision, strategy in (("bf16", "ddp"), ("fp16", "full_shard")):
        made = trainer(precision=precision, strategy=strategy)
        first, last = made.train(fit, epochs=2)
        assert last["train_loss"] < min(1.1, first["train_loss"]), (precision, strategy)

    # Parts that a rank does not use.
    torch.manual_seed(0)
    forks = Forks()
    before = forks.halves[1].weight.detach().clone()
    made = Trainer(
        forks,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        nn.CrossEntropyLoss(),
        find_unused_parameters=True,
    )
    made.train(fit, epochs=1)
    assert not torch.equal(whole(forks)["halves.1.weight"], before)

    # When it ends.
    assert trainer().train(fit, epochs=9, max_period="2 steps")[-1]["step"] == 2
    assert trainer().train(fit, max_period="2 epochs")[-1]["epoch"] == 2
    assert trainer().train(fit, epochs=1, min_period="3 epochs")[-1]["epoch"] == 3
    quick = trainer()
    quick.train(fit, max_period="0.05s")
    assert quick.state.ended == "max_period is over"
    patient = trainer(on_epoch_end=lambda made: True)
    assert patient.train(fit, min_period="2 epochs", max_period="9 epochs")[-1]["epoch"] == 2
    assert patient.state.ended.startswith("ended by a hook that returned True")
    for given, ends in (
        (np.True_, True),
        (torch.tensor(True), True),
        ({"loss": 1.0}, False),
        (1, False),
    ):
        hooked = trainer(on_epoch_end=lambda made, given=given: given)
        assert hooked.train(fit, epochs=2)[-1]["epoch"] == (1 if ends else 2), given
    asked = trainer(on_epoch_end=lambda made: rank == 1 and os.kill(os.getpid(), signal.SIGTERM))
    asked.train(fit, max_period="1h")
    assert asked.state.ended == "asked to stop"

    # Only a part of the parameters; learning rates for many ranks; the norm of nothing but those.
    model = net()
    before = whole(model)
    made = Trainer(
        model, torch.optim.SGD(model.head.parameters(), 0.1), nn.CrossEntropyLoss(), scale_lr=True
    )
    made.train(fit, epochs=1)
    after = whole(model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"head.weight", "head.bias"}
    assert made.optimizer.param_groups[0]["lr"] == 0.1

    # Saved on two ranks by hand, and read back.
    path = made.save_checkpoint(directory / "own.pt")
    other = net(seed=3)
    again = Trainer(other, torch.optim.SGD(other.head.parameters(), 0.1), nn.CrossEntropyLoss())
    assert again.load_checkpoint(path) == path
    assert all(torch.equal(value, whole(other)[name]) for name, value in after.items())
    assert again.evaluate(loader(13)) == made.evaluate(loader(13))

    # What was saved last counts, also beside higher steps of an older run; a damaged one does not.
    fresh = trainer()
    fresh.train(fit, max_period="2 steps")
    low = fresh.save_checkpoint(directory / "shared")
    fresh.train(fit, max_period="5 steps")
    high = fresh.save_checkpoint(directory / "shared")
    fresh.load_checkpoint(low)
    assert fresh.save_checkpoint(directory / "shared") == low
    assert fresh.load_checkpoint(directory / "shared") == low
    distributed.barrier()
    if rank == 0:
        (data,) = low.glob("__0_*")
        data.write_bytes(data.read_bytes()[:-1] + b"?")
    distributed.barrier()
    assert fresh.load_checkpoint(directory / "shared") == high
    sharded = trainer(strategy="full_shard")
    results = {
        "later": message(
            trainer().train, fit, epochs=1, save_every="1s", save_to=directory / "shared"
        ),
        "stranger": message(Trainer, net(), optimizer(net()), nn.CrossEntropyLoss()),
        "twice": message(Trainer, sharded.bare, torch.optim.SGD, nn.CrossEntropyLoss()),
        "endless": message(made.train, fit),
        "period": message(made.train, fit, max_period="5 parsecs"),
        "bare period": message(made.train, fit, max_period="30"),
        "strategy": message(trainer, strategy="hybrid_sharp"),
        "config": message(trainer, config={"fsdp": {"shard_sise": 2}}),
        "both": message(trainer, step=print),
        "sum": message(Trainer, net(), torch.optim.SGD, nn.MSELoss(reduction="sum")),
        "batch": message(made.train, [torch.zeros(2)] * 4, epochs=99),
        "file": message(made.load_checkpoint, directory / "spec.json"),
    }
    tell(directory, results)


def tells_its_owner(directory: Path) -> None:
    """Hooks, and the random numbers of the user, which training leaves alone."""
    results: list[Any] = []

    def drawn() -> list[float]:
        return [torch.rand(1).item(), random.random(), np.random.rand()]

    def begins(made: Trainer) -> None:
        results.append(["begin", made.state.step, made.model.training])

    def stepped(made: Trainer) -> bool:
        results.append(["step", made.state.step, drawn()])
        return made.state.step == 5 and made.ranks.rank == 1

    def epoch(made: Trainer) -> None:
        results.append(["epoch", made.state.step, drawn()])
        made.evaluate(loader(13))

    distributed.setup_distributed()
    for more in ({}, {"on_train_begin": begins, "on_step_end": stepped, "on_epoch_end": epoch}):
        made = trainer(**more)
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        made.train(loader(shuffle=True), epochs=9, max_period="12 steps")
        results.append(["end", made.state.step, drawn()])
    steps = []
    for hooks in (
        {"on_train_begin": lambda made: made.ranks.rank == 1},
        {"on_step_end": lambda made: made.stop() if made.ranks.rank == 1 else None},
    ):
        short = trainer(**hooks)
        short.train(
            loader(), epochs=2, save_every="1 step", save_to=directory / f"short{len(steps)}"
        )
        steps.append(short.state.step)
    results.append([steps, [path.name for path in (directory / "short0").glob("step_*")]])
    tell(directory, [made.state.ended, *results])


def keeps_the_best(directory: Path) -> None:
    """The learning rate grows until it does harm: the best epoch is neither first nor last."""
    model = net()
    made = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.02),
        nn.CrossEntropyLoss(),
        scheduler=lambda sgd: torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=3.0),
        scheduler_every="epoch",
    )
    kept = directory / "kept"
    refused = message(made.train, loader(), epochs=1, best="min val_loss", save_to=kept)
    made.state.step = 0
    history = made.train(
        loader(), loader(), epochs=99, best="min val_loss", patience=3, keep=1, save_to=kept
    )
    ended, best = made.state.ended, made.state.best
    made.load_checkpoint(kept / "best")
    there = sorted(path.name for path in kept.iterdir())
    results = [refused, history, ended, best, made.evaluate(loader()), made.state.epoch, there]
    tell(directory, results)


class Tied(Net):
    """Two names of one weight, a buffer that is kept, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.layers[0]
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("cache", torch.zeros(1), persistent=False)


class Written:
    """A config as transformers has it."""

    architectures: list[str] | None = None

    def save_pretrained(self, directory: Path) -> None:
        (directory / "config.json").write_text(json.dumps({"architectures": self.architectures}))


def gives_itself_away(directory: Path) -> None:
    """Whole weights under every strategy, for the test to compare."""
    results: dict[str, Any] = {}
    for strategy in (*MORE, *(("dp", "none") if world() == 1 else ())):
        torch.manual_seed(0)
        model = Tied()
        model.config = Written()
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        made = Trainer(model, torch.optim.SGD, nn.CrossEntropyLoss(), strategy=strategy)
        model.eval()
        model.layers[1].train()
        first = made.ranks.rank == 0
        state = made.state_dict()
        assert state.keys() == (expected.keys() if first else set())
        assert all(torch.equal(value, expected[name]) for name, value in state.items())
        assert not first or state["again.weight"] is state["layers.0.weight"]
        for name in ("one.safetensors", "one.pt", "whole"):
            made.save(
                directory / strategy / name if name == "whole" else directory / f"{strategy}-{name}"
            )
        made.save_checkpoint(directory / strategy / "kept")
        assert [module.training for module in model.layers] == [False, True]
        results[strategy] = True
    results["where"] = message(made.save, directory / "one.txt")
    results["disk"] = message(made.save, directory / "no" / "one.safetensors")
    torch.save(results, directory / f"results_{made.ranks.rank}")


class Several(Net):
    """A model of more than one forward, with an attribute, and a weight that its user takes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.width = 6

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale
        return x


def uses_all_of_it(model: Any, batch: Any) -> tuple[Tensor, int]:
    x, y = batch
    assert x.shape[1] == model.width
    logits = model.head(model.encode(x)) + model(x) * model.scale.sum()
    return nn.functional.cross_entropy(logits, y, reduction="sum"), int((y >= 0).sum())


def all_of_a_model(directory: Path) -> None:
    """A step that uses the model's own methods and parts, under every strategy."""
    found = {}
    for strategy in (*MORE, *(("dp", "none") if world() == 1 else ())):
        torch.manual_seed(0)
        model = Several()
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        made = Trainer(model, sgd, step=uses_all_of_it, strategy=strategy, accumulate=2)
        made.train(loader(), loader(13), epochs=1)
        found[strategy] = whole(model), made.state.val_metrics["loss"]
    if made.ranks.rank == 0:
        torch.save(found, directory / "found")


# -- keys of config= ----------------------------------------------------------------------------

CONFIG = {
    "training": {"max_steps": 8, "eval_steps": 3, "eval_batches": 1, "deterministic": True},
    "checkpoint": {"steps": 3, "keep": 2, "asynchronous": False},
    "profiling": {"enabled": True, "wait": 0, "warmup": 0, "active": 1},
    "logging": {"interval": 4},
}


class Counted(Net):
    flops_per_sample = 1e4


def read_lines(directory: Path) -> list[dict[str, Any]]:
    (file,) = directory.glob("*/outputs/rank_00_metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def keys_at_work(directory: Path) -> None:
    """A Trainer that is told by its config alone, then one whose time is over."""
    fit = loader(shuffle=True)
    torch.manual_seed(0)
    model = Counted()
    keys = {**CONFIG, "checkpoint": {**CONFIG["checkpoint"], "directory": str(directory / "kept")}}
    # Adadelta has no fused kernel.
    optimizer = torch.optim.Adadelta(model.parameters())
    first = Trainer(model, optimizer, nn.CrossEntropyLoss(), config=keys)
    first.train(fit, loader(13), epochs=50)
    lines = read_lines(directory)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    short = trainer(config={"training": {"max_minutes": 1e-9}})
    short.train(fit, epochs=50)
    results = [first.state.ended, first.state.step, deterministic, short.state.ended, lines]
    if first.ranks.rank == 0:
        (directory / "told").write_text(json.dumps(results))
