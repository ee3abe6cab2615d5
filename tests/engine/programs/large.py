"""Models that are never whole on a rank; worlds.py calls these with the job's directory."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from orchestrator import Trainer, distributed
from orchestrator.engine.sharding.mesh import local_tensor
from tests.engine.programs.basics import (
    RANK,
    message,
    net,
    tell,
    whole,
    world,
)

# Each block has 4 MiB.
WIDTH, BLOCKS = 1024, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.line(x))


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, 3)
        self.head.register_buffer("shift", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)) + self.head.shift


def write(directory: Path) -> None:
    """Write a file for each half of the blocks, in half precision, and the index."""
    index = {}
    for half in range(2):
        names = [f"blocks.{n}.line.weight" for n in range(half, BLOCKS, 2)]
        tensors = {
            name: torch.full((WIDTH, WIDTH), int(name.split(".")[1]) / 64).bfloat16()
            + torch.arange(WIDTH).bfloat16()[:, None]
            for name in names
        }
        if half:
            tensors |= {"head.weight": torch.ones(3, WIDTH), "head.bias": torch.ones(3)}
            tensors["head.shift"] = torch.full((3,), 2.0)
        file = f"part{half}.safetensors"
        save_file(tensors, directory / file)
        index |= dict.fromkeys(tensors, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def memory() -> dict[str, int]:
    """Bytes that this process has now (VmRSS) and had at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if "kB" in line}


def sharded_from_files(directory: Path) -> None:
    """Record each rank's peak memory while the model is made, and its weights."""
    distributed.setup_distributed()
    weights = directory / "weights"
    if RANK == 0:
        weights.mkdir()
        write(weights)
    distributed.barrier()
    before = memory()["VmRSS"]
    # This resets the peak.
    Path("/proc/self/clear_refs").write_text("5")
    with torch.device("meta"):
        model = Large()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    trainer = Trainer(
        model, optimizer, nn.CrossEntropyLoss(), strategy="full_shard", weights=weights
    )
    taken = memory()["VmHWM"] - before
    blocks = trainer.bare.blocks
    rows = [local_tensor(block.line.weight) for block in blocks]
    first = RANK * WIDTH // world()
    right = all(
        torch.equal(
            own,
            (torch.full_like(own, n / 64).bfloat16()
             + torch.arange(first, first + len(own)).bfloat16()[:, None]).float(),
        )
        for n, own in enumerate(rows)
    )  # fmt: skip
    results: dict[str, Any] = {
        "taken": taken,
        "right": right,
        "shift": trainer.bare.head.shift.tolist(),
    }
    results["refused"] = refused(directory)
    results["same"] = same(directory)
    tell(directory, results)


def refused(directory: Path) -> list[str]:
    def tried(weights: Any, model: type[nn.Module] = nn.Linear) -> str:
        with torch.device("meta"):
            made = model(6, 3)
        return message(Trainer, made, torch.optim.SGD, nn.MSELoss(), weights=weights)

    if RANK == 0:
        save_file({"weight": torch.ones(3, 6)}, directory / "short.safetensors")
        save_file(
            {"weight": torch.ones(3, 5), "bias": torch.ones(3)}, directory / "other.safetensors"
        )
        (directory / "no.safetensors").write_text("no")
    distributed.barrier()
    names = ("short", "other", "no", "absent")
    return [tried(None), *(tried(directory / f"{name}.safetensors") for name in names)]


def same(directory: Path) -> list[float]:
    """How far a model with weights from a file is from one with these weights, once trained."""
    targets = torch.arange(8) % 3
    fit = DataLoader(TensorDataset(torch.randn(8, 6), targets), 8 // world())
    first = net(seed=1)
    saved = Trainer(first, torch.optim.SGD, nn.CrossEntropyLoss(), strategy="ddp")
    saved.save(directory / "net.safetensors")
    saved.train(fit, epochs=1, verbose=False)
    far = []
    for strategy in ("hybrid_shard", "ddp"):
        for meta in (True, False):
            with torch.device("meta" if meta else "cpu"):
                model = net(seed=2)
            made = Trainer(
                model, torch.optim.SGD, nn.CrossEntropyLoss(), strategy=strategy,
                weights=directory / "net.safetensors",
            )  # fmt: skip
            made.train(fit, epochs=1, verbose=False)
            own, expected = whole(made.bare), whole(first)
            far.append(max((own[name] - expected[name]).abs().max().item() for name in expected))
    return far
