"""The engine's numbers: the same for every way to spread the work, and those of a plain loop."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.config import parse
from orchestrator.config.schema import Config
from orchestrator.engine.core.optimizer import learning_rate_factor
from orchestrator.engine.data.rounds import Order
from tests.engine.programs import configured as own
from tests.engine.worlds import CONFIGURED, Job, run

pytestmark = pytest.mark.slow

STEPS = 6
# This counts all ranks and micro-batches together.
BATCH = 24
CLIP = 0.19

BASE: dict[str, Any] = {
    "training": {
        "max_steps": STEPS,
        "grad_clip_norm": CLIP,
        "loss": f"{CONFIGURED}:loss",
    },
    "model": {"target": f"{CONFIGURED}:model"},
    "dataset": {"target": f"{CONFIGURED}:uneven"},
    "optimizer": {"lr": 0.05, "weight_decay": 0.1},
    "logging": {"interval": 1},
    "checkpoint": {"asynchronous": False},
}


def config(*changes: dict[str, Any], world: int = 1, batch: int = BATCH) -> dict[str, Any]:
    """Return BASE with changes; the batch of all ranks is the same for every world size."""
    merged = copy.deepcopy(BASE)
    for section, values in itertools.chain.from_iterable(change.items() for change in changes):
        merged.setdefault(section, {}).update(values)
    micro = merged["training"].get("gradient_accumulation", 1)
    merged["training"].setdefault("batch_size", batch // world // micro)
    return merged


def job(directory: Path, name: str, nodes: list[int], *changes: dict[str, Any], **more: Any) -> Job:
    return Job(str(directory / name), nodes, config(*changes, world=sum(nodes)), **more)


def fsdp(strategy: str, **more: Any) -> dict[str, Any]:
    return {"fsdp": {"sharding_strategy": strategy, **more}}


def accumulate(count: int) -> dict[str, Any]:
    return {"training": {"gradient_accumulation": count}}


def weights(job: Job) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    (directory,) = (job.experiment() / "outputs/checkpoints").glob(f"step_{STEPS:08d}")
    reader = FileSystemReader(directory)
    found = {
        name: torch.empty(entry.size)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.startswith("model.")
    }
    load(found, storage_reader=reader, no_dist=True)
    return {name.removeprefix("model."): value for name, value in found.items()}


def plain_loop() -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train by the config in a minimal plain loop, with the engine's order of data alone."""
    made: Config = parse.build_dataclass(Config, config())
    torch.manual_seed(0)
    model = own.model()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    source = own.uneven("train")
    order = Order(len(source), 0, shuffle=True)
    steps = []
    for step in range(STEPS):
        samples = [source[index] for index in order.indices(step * BATCH, BATCH)]
        batch = torch.utils.data.default_collate(samples)
        total, count, _ = own.loss(model, batch)
        (total / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * learning_rate_factor(made.scheduler, step + 1, STEPS)
        optimizer.step()
        optimizer.zero_grad()
        steps.append({"loss": (total / count).item(), "grad_norm": norm.item()})
    return steps, {name: p.detach() for name, p in model.named_parameters()}


LAYOUTS: dict[str, tuple[list[int], list[dict[str, Any]]]] = {
    "alone": ([1], []),
    "hybrid 2x2, in three": ([2, 2], [fsdp("hybrid_shard"), accumulate(3)]),
    "hybrid 2x2, in three, whole": (
        [2, 2],
        [fsdp("hybrid_shard", accumulate="whole"), accumulate(3)],
    ),
    "hybrid, groups of two": ([4], [fsdp("hybrid_shard", shard_size=2)]),
    "full, uneven": ([3], [fsdp("full_shard")]),
    "grad_op": ([2], [fsdp("shard_grad_op", forward_prefetch=1, backward_prefetch=2)]),
    "ddp of three, in two, static graph": (
        [3],
        [fsdp("no_shard"), accumulate(2), {"distributed": {"static_graph": True}}],
    ),
}


def test_every_layout_computes_as_plain_loop(tmp_path: Path) -> None:
    """Losses, norms of the whole gradient (clipped in every step) and the parameters at the end,
    with a different number of tokens on every rank and in every micro-batch."""
    jobs = {name: job(tmp_path, name, nodes, *how) for name, (nodes, how) in LAYOUTS.items()}
    codes = run(*jobs.values())
    steps, parameters = plain_loop()
    assert all(step["grad_norm"] > CLIP for step in steps)
    for (name, one), ended in zip(jobs.items(), codes, strict=True):
        assert set(ended) == {0}, one.output()
        for rank in range(len(ended)):
            found = one.metrics(rank)
            for key in ("loss", "grad_norm"):
                expected = pytest.approx([step[key] for step in steps], abs=1e-5)
                assert [step[key] for step in found] == expected, (name, rank, key)
        last = weights(one)
        assert last.keys() == parameters.keys()
        for key, value in parameters.items():
            torch.testing.assert_close(last[key], value, atol=1e-5, rtol=0, msg=f"{name}: {key}")
