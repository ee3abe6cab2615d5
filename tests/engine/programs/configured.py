"""A user's own model, data and loss, as a config names them: module:function."""

import atexit
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

LENGTH = 16
Sample = dict[str, Tensor]


class Uneven(Dataset[Sample]):
    """Sentences of 1 to 16 tokens: a mean per rank would not be the mean of all."""

    def __init__(self, size: int, broken: list[int]) -> None:
        self.size, self.broken = size, broken

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        own = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 32, (LENGTH + 1,), generator=own)
        targets = tokens[1:].clone()
        targets[1 + index * 7 % LENGTH :] = -100
        weight = torch.tensor(float("nan") if index in self.broken else 1.0)
        return {"inputs": tokens[:-1], "targets": targets, "weight": weight}


def uneven(split: str, size: int = 480, broken: list[int] | None = None) -> Uneven:
    return Uneven(size if split == "train" else 37, broken or [])


class Noted(Uneven):
    """Writes down which samples this rank has read, in their order."""

    def __getitem__(self, index: int) -> Sample:
        with Path(os.environ["ORCHESTRATOR_EXPERIMENT"], f"read_{os.environ['RANK']}").open(
            "a"
        ) as f:
            f.write(f"{index}\n")
        return super().__getitem__(index)


def noted(split: str) -> Noted:
    return Noted(480 if split == "train" else 37, [])


class Bag(nn.Module):
    """Guesses each token from the one before it, with what was seen so far mixed in."""

    def __init__(self, dim: int, heads: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.unused = nn.Linear(heads, heads, bias=False) if heads > 1 else None
        self.head = nn.Linear(dim, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x.cumsum(1) / 4))
        logits: Tensor = self.head(x)
        return logits


def model(dim: int = 8, heads: int = 1) -> Bag:
    return Bag(dim, heads)


class Counting(Bag):
    """Has a buffer that is each rank's own, as the running statistics of a BatchNorm are."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += tokens.numel()
        return super().forward(tokens)


def with_buffers(dim: int = 8) -> Bag:
    return Counting(dim)


def without_memory(dim: int = 8) -> Bag:
    with torch.device("meta"):
        return Bag(dim)


def shortens() -> nn.Module:
    """Each rank would shorten the rows that it looks up."""
    return nn.Embedding(5, 8, max_norm=1.0)


def loss(model: nn.Module, batch: Sample) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    logits = model(batch["inputs"])
    targets = batch["targets"]
    each = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    weighted = each.view_as(targets) * batch["weight"][:, None]
    counted = targets != -100
    correct = ((logits.argmax(-1) == targets) & counted).sum()
    return weighted[counted].sum(), counted.sum(), {"correct": correct}


def counting_loss(model: nn.Module, batch: Sample) -> tuple[Tensor, Tensor]:
    """The same; and $COUNT_INTO/rank_N.json says which collectives this rank took part in, how
    often, and with how many elements."""
    if not _counted:
        _count()
    found = loss(model, batch)
    return found[0], found[1]


_counted: dict[str, list[int]] = {}


def _count() -> None:
    _counted["begun"] = []
    ranks_of_node = int(os.environ["LOCAL_WORLD_SIZE"])

    def counted(name: str, call: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group") or next(
                (arg for arg in args if isinstance(arg, dist.ProcessGroup)), dist.group.WORLD
            )
            nodes = {rank // ranks_of_node for rank in dist.get_process_group_ranks(group)}
            size = max(arg.numel() for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor))
            # The engine's own agreements are smaller.
            if size > 8:
                where = "between nodes" if len(nodes) > 1 else "within a node"
                times = _counted.setdefault(f"{name} {where}", [0, 0])
                times[:] = times[0] + 1, times[1] + size
            return call(*args, **kwargs)

        return wrapper

    # What earlier versions of torch call the last two.
    names = {
        "reduce_scatter_single": "reduce_scatter_tensor",
        "all_gather_single": "all_gather_into_tensor",
    }
    for name in ("all_reduce", *names):
        there = name if hasattr(dist, name) else names[name]
        setattr(dist, there, counted(name, getattr(dist, there)))

    path = Path(os.environ["COUNT_INTO"], f"rank_{dist.get_rank()}.json")
    save = _write_at_the_end(path)
    atexit.register(save)
    os._exit = lambda code, leave=os._exit: (save(), leave(code))  # type: ignore[assignment,misc]


def _write_at_the_end(path: Path) -> Any:
    return lambda: path.write_text(json.dumps(_counted))
