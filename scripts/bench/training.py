"""Measure what a Trainer adds to a training: to its loader, its rounding and its memory.

    python scripts/bench/training.py [--only loader,rounding,memory] [--repeat 5] [--json]

Each figure stands beside a plain torch loop, or torch's AdamW, in the same run; read the ratios.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine import torchrun
from ground import machine, show, table
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from orchestrator import Trainer

PARTS = ("loader", "rounding", "memory")
SAMPLES, BATCH = 4096, 32
Rows = list[list[str]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a Trainer adds to a training.")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    # The measurement that a rank makes.
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        print_of_rank(options.rank, options.repeat)
        return
    about, data, texts = machine(Path(sys.executable)), {}, []
    for part in options.only.split(","):
        found = {f"{n} rank{'s' * (n > 1)}": measured(part, n, options.repeat) for n in (1, 2)}
        data[part] = found
        texts.append(SHOWN[part](found))
    show(options.json, "What a Trainer adds", about, "\n\n".join(texts), data)


def measured(part: str, ranks: int, repeat: int) -> Any:
    said = torchrun(ranks, [__file__, "--rank", part, "--repeat", str(repeat)])
    return json.loads(said.strip().splitlines()[-1])


def print_of_rank(part: str, repeat: int) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        found = {"loader": loader, "rounding": rounding, "memory": memory}[part](
            repeat, Path(place)
        )
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


# -- the loader -----------------------------------------------------------------------------------


class Pictures(Dataset[tuple[Tensor, int]]):
    """Samples that take a while to make, as decoding and augmenting do."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = torch.arange(3 * self.size**2, dtype=torch.float32).view(3, self.size, self.size)
        return (picture * index).sin().flip(2).sub_(0.5), index % 10


Speeds = list[tuple[float, float]]


def loader(repeat: int, _place: Path) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the figures of this rank's loader, plain and as a Trainer reads it.

    They are the samples per second, and the milliseconds of processor time for each, which other
    programs do not change.
    """
    found: dict[str, dict[str, tuple[float, float]]] = {}
    ranks = dist.get_world_size()
    for name, size in (("small samples", 2), ("samples of 196 kB", 128)):
        for workers in (0, 2 // ranks):
            speeds: dict[str, Speeds] = {"plain": [], "Trainer": []}
            for _turn in range(repeat):
                speeds["plain"].append(speed(plain_batches(size, workers)))
                speeds["Trainer"].append(speed(trainers_batches(size, workers)))
            found[f"{name}, {workers} worker{'s' * (workers != 1)}"] = {
                who: (statistics.median(s for s, _ in each), statistics.median(p for _, p in each))
                for who, each in speeds.items()
            }
    return found


def plain_batches(size: int, workers: int) -> Iterator[Any]:
    dataset = Pictures(size)
    sampler: Any = DistributedSampler(dataset) if dist.get_world_size() > 1 else None
    yield from DataLoader(
        dataset, BATCH, shuffle=sampler is None, sampler=sampler, num_workers=workers
    )


def trainers_batches(size: int, workers: int) -> Iterator[Any]:
    """Yield the batches that the loop of a Trainer reads in an epoch."""
    model = nn.Linear(1, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters()), functional.mse_loss)
    given = DataLoader(Pictures(size), BATCH, shuffle=True, num_workers=workers)
    yield from trainer._training._shared(given, "train_loader").epoch(0)


def speed(batches: Iterator[Any]) -> tuple[float, float]:
    dist.barrier()
    used = processor_time()
    next(batches)
    began, count = time.perf_counter(), 1
    for _batch in batches:
        count += 1
    seconds = time.perf_counter() - began
    return (count - 1) * BATCH / seconds, 1e3 * (processor_time() - used) / (count * BATCH)


def processor_time() -> float:
    """Return the processor time of this process and of workers that have ended."""
    who = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, who))


def loader_shown(found: dict[str, Any]) -> str:
    rows = []
    for ranks, each in found.items():
        for name, speeds in each.items():
            (plain, used), (own, own_used) = speeds["plain"], speeds["Trainer"]
            shown = (
                f"{plain:,.0f}/s",
                f"{own / plain:.2f}",
                f"{used:.3f} ms",
                f"{own_used / used:.2f}",
            )
            rows.append([ranks, name, *shown])
    head = ["a DataLoader reads", "the Trainer's", "processor time of a sample", "the Trainer's"]
    return table(["loader", "of", *head], rows)


# -- rounding -------------------------------------------------------------------------------------

ACCUMULATE, STEPS = 4, 100


def rounding(_repeat: int, _place: Path) -> dict[str, tuple[float, float]]:
    """Return how far bf16 with accumulation is from fp64: the losses of all steps, the weights."""
    exact = plain_loop(torch.float64, autocast=False)
    strategy = "full_shard" if dist.get_world_size() > 1 else "ddp"
    ways: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "plain loop, fp32": lambda: plain_loop(torch.float32, autocast=False),
        "plain loop, bf16": lambda: plain_loop(torch.float32, autocast=True),
        "Trainer, fp32": lambda: trainers_loop("fp32", strategy),
        "Trainer, bf16": lambda: trainers_loop("bf16", strategy),
    }
    return {
        name: (apart(losses, exact[0]), apart(weights, exact[1]))
        for name, (losses, weights) in ((name, way()) for name, way in ways.items())
    }


def apart(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


class Net(nn.Module):
    """A few blocks with norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        result: Tensor = self.last(x)
        return result


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * BATCH, 32, generator=draw)
    return TensorDataset(x, (x @ torch.randn(32, 8, generator=draw)).sin())


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def plain_loop(dtype: torch.dtype, *, autocast: bool) -> tuple[Tensor, Tensor]:
    model = Net().to(dtype)
    optimizer, losses = adamw(model), []
    for x, y in DataLoader(data(), BATCH):
        step = []
        for part, targets in zip(x.chunk(ACCUMULATE), y.chunk(ACCUMULATE), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                outputs = model(part.to(dtype))
            loss = functional.mse_loss(outputs.to(dtype), targets.to(dtype)) / ACCUMULATE
            loss.backward()
            step.append(loss.detach().double())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(step).sum())
    return torch.stack(losses), flat(model)


def trainers_loop(precision: str, strategy: str) -> tuple[Tensor, Tensor]:
    model, losses = Net(), []
    world = dist.get_world_size()
    accumulate = ACCUMULATE // world

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = functional.mse_loss(outputs.float(), targets)
        losses.append(value.detach().double())
        return value

    trainer = Trainer(
        model, adamw(model), loss, precision=precision, accumulate=accumulate, strategy=strategy
    )
    trainer.train(DataLoader(data(), BATCH // ACCUMULATE), epochs=1, verbose=False)
    mean = torch.stack(losses).view(STEPS, accumulate).mean(1)
    if world > 1:
        dist.all_reduce(mean)
    return mean / world, flat(trainer.bare)


def flat(model: nn.Module) -> Tensor:
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return torch.cat([tensor.detach().double().flatten() for tensor in whole])


def rounding_shown(found: dict[str, Any]) -> str:
    rows = [
        [ranks, name, *(f"{value:.1e}" for value in values)]
        for ranks, each in found.items()
        for name, values in each.items()
    ]
    head = [f"{STEPS} steps of {ACCUMULATE} micro-batches", "", "losses", "weights"]
    return table([*head[:2], f"{head[2]}, of fp64", head[3]], rows)


# -- memory ---------------------------------------------------------------------------------------

WIDTH, BLOCKS = 1024, 10


def memory(_repeat: int, place: Path) -> dict[str, dict[str, float]]:
    """Return the bytes of this rank: weights, state, and the peak of a step beyond those."""
    kinds: dict[str, Any] = {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
        "Muon": lambda p: torch.optim.Muon(p, lr=1e-3),
    }
    return {name: bytes_of_step(make, place / f"{name}.json") for name, make in kinds.items()}


def bytes_of_step(make: Callable[[Any], Any], trace: Path) -> dict[str, float]:
    """Count what torch allocates and frees from the end of one step to the end of the next."""
    torch.manual_seed(0)
    wide = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)] * BLOCKS
    blocks = (nn.Sequential(nn.Linear(*shape, bias=False), nn.Tanh()) for shape in wide)
    model = nn.Sequential(*blocks)
    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )

    def step_done(trainer: Trainer) -> None:
        if trainer.state.step == 1:
            profile.start()
        if trainer.state.step == 2:
            profile.stop()

    strategy = "full_shard" if dist.get_world_size() > 1 else "ddp"
    trainer = Trainer(
        model,
        make(model.parameters()),
        functional.mse_loss,
        strategy=strategy,
        on_step_end=step_done,
    )
    x = torch.randn(4 * dist.get_world_size(), WIDTH)
    trainer.train(DataLoader(TensorDataset(x, x), 2), epochs=1, verbose=False)
    profile.export_chrome_trace(str(trace))
    kept = [value for each in trainer.optimizer.state.values() for value in each.values()]
    return {
        "weights": size(list(model.parameters())),
        "state": size([value for value in kept if isinstance(value, Tensor)]),
        **peaks(json.loads(trace.read_text())["traceEvents"]),
    }


def size(tensors: list[Any]) -> float:
    locals_ = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return float(sum(tensor.numel() * tensor.itemsize for tensor in locals_))


def peaks(events: list[dict[str, Any]]) -> dict[str, float]:
    """Return the peaks beyond the memory at the start: of a step and within the optimizer."""
    steps = [e for e in events if str(e.get("name", "")).startswith("Optimizer.step#")]
    began, ended = steps[-1]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    now, most = 0.0, {"step": 0.0, "optimizer": 0.0}
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        most["step"] = max(most["step"], now)
        if began <= event["ts"] <= ended:
            most["optimizer"] = max(most["optimizer"], now)
    return most


def memory_shown(found: dict[str, Any]) -> str:
    names = ("weights", "state", "step", "optimizer")
    rows = [
        [
            ranks,
            name,
            *(f"{values[key] / 1e6:,.0f} MB" for key in names),
            f"{whole(values) / whole(each['AdamW']):.2f}",
        ]
        for ranks, each in found.items()
        for name, values in each.items()
    ]
    head = ["weights", "state", "most beside them in a step", "in the optimizer's", "of AdamW's"]
    return table(["a rank's bytes", "", *head], rows)


def whole(values: dict[str, float]) -> float:
    return values["weights"] + values["state"] + values["step"]


SHOWN: dict[str, Callable[[dict[str, Any]], str]] = {
    "loader": loader_shown,
    "rounding": rounding_shown,
    "memory": memory_shown,
}


if __name__ == "__main__":
    main()
