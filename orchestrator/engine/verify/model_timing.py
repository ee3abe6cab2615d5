"""Time one step of the configured model on this device by its parts: one block, the head
with its loss, the optimizer per parameter; the prediction of step times is made of them.

The model itself gets no memory: its parameters are counted on torch's meta device. Parts, because
figures of peak performance say little of a small model, and a large one fits only when sharded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.config.schema import Config
from orchestrator.engine.models import build, decoder, import_by_name, losses
from orchestrator.engine.sharding import low_precision, mesh
from orchestrator.engine.sharding.blocks import blocks_of
from orchestrator.engine.verify.teams import World

WINDOW_SECONDS = 0.25  # for one part
TOO_LONG_SECONDS = 2.0  # a part that would take longer is reckoned from its FLOPs
SAMPLE = 1 << 20  # parameters of the optimizer's trial


def of(config: Config, world: World, flops: float) -> dict[str, Any]:
    """`flops`: what a large multiplication reaches here, per second."""
    model = without_memory(config)
    blocks = blocks_of(model, config.fsdp.wrap)
    counts = [sum(weight.numel() for weight in block.parameters()) for block in blocks]
    total = sum(weight.numel() for weight in model.parameters())
    samples = config.training.batch_size
    per_sample = build.flops_per_sample(config, model)
    report: dict[str, Any] = {
        "parameters": total,
        "groups": [total - sum(counts), *counts],  # as FSDP gathers them: the rest, then blocks
        "optimizer": world.most(optimizer_seconds(config, world)),  # per parameter
        "micro_batch": None,
    }
    if per_sample is None:
        return report
    if config.model.kind == "target":
        seconds, how = per_sample * samples / flops, "its FLOPs at the speed of a multiplication"
    else:
        rows = samples * length_of(config)
        seconds = part(world, block_run(config, model, world), 6 * counts[0] * rows / flops)
        seconds *= len(counts)
        if isinstance(model, decoder.Decoder):
            head = 6 * config.model.vocab_size * config.model.model_dim * rows / flops
            seconds += part(world, head_run(config, rows, world), head)
        how = "one block and the head, timed here"
    return {**report, "micro_batch": world.most(seconds), "how": how}


def without_memory(config: Config) -> nn.Module:
    if config.model.kind != "target":
        return build.build(config)
    with torch.device("meta"):
        model = import_by_name.call("model", config.model.target or "", config.model.args)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{config.model.target} gave {import_by_name.kind(model)}")
    return model


def length_of(config: Config) -> int:
    """Return the tokens of one sample: for a ranking model a feature is a token."""
    if config.model.kind == "ranking":
        return config.model.sparse_features + config.model.num_dense_features
    return config.dataset.sequence_length


# -- the parts ------------------------------------------------------------------------------------


def part(world: World, run: Callable[[], None], reckoned: float) -> float:
    """Return the median of some runs, all ranks at once as in training."""
    if world.most(reckoned) > TOO_LONG_SECONDS:
        return reckoned
    run()  # chooses kernels, takes memory
    world.settle()
    world.most(0.0)
    times: list[float] = []
    until = time.perf_counter() + WINDOW_SECONDS
    while len(times) < 3 or time.perf_counter() < until:
        times.append(world.seconds(run))
        if sum(times) > TOO_LONG_SECONDS:
            break
    return statistics.median(times)


def block_run(config: Config, model: nn.Module, world: World) -> Callable[[], None]:
    """Forward and backward of the first block."""
    dtype, dim = low_precision.DTYPES[config.training.mixed_precision], config.model.model_dim
    block = next(child for child in model.children() if isinstance(child, nn.ModuleList))[0]
    block.to_empty(device=world.device)
    with torch.no_grad():
        for weight in block.parameters():
            weight.uniform_(-0.02, 0.02)
    block.to(dtype)
    mesh.recompute(block, config.training.activation_checkpointing)
    length = length_of(config)
    shape = (config.training.batch_size, length, dim)
    x = torch.randn(shape, device=world.device, dtype=dtype, requires_grad=True)
    more: list[Tensor] = []
    if isinstance(model, decoder.Decoder):
        heads = config.model.model_dim // config.model.num_heads
        angles = decoder.rotation(length, heads, config.model.rope_theta, world.device)
        more = [angle.to(dtype) for angle in angles]

    def run() -> None:
        y = block(x, *more)
        torch.autograd.backward(y, torch.ones_like(y))
        block.zero_grad()

    return run


def head_run(config: Config, rows: int, world: World) -> Callable[[], None]:
    """Return a run of logits, loss and both of their gradients."""
    dtype = low_precision.DTYPES[config.training.mixed_precision]
    options = {"device": world.device, "dtype": dtype, "requires_grad": True}
    hidden = torch.randn(rows, config.model.model_dim, **options)  # type: ignore[call-overload]
    weight = torch.randn(config.model.vocab_size, config.model.model_dim, **options)  # type: ignore[call-overload]
    targets = torch.randint(config.model.vocab_size, (rows,), device=world.device)

    def run() -> None:
        sums = losses.summed(hidden, weight, targets, config.model.loss_chunk, False)
        torch.autograd.backward(sums.loss)
        hidden.grad = weight.grad = None

    return run


def optimizer_seconds(config: Config, world: World) -> float:
    """Time the kernel of torch.optim, which would first import dynamo: 0.6 s of CPU."""
    weights, gradients, first, second = (
        [torch.rand(SAMPLE, device=world.device)] for _ in range(4)
    )
    keys, steps = config.optimizer, [torch.ones((), device=world.device)]
    kernel: Any = torch._fused_adamw_ if keys.name == "adamw" else torch._fused_sgd_
    options: dict[str, Any] = {"lr": 1e-9, "weight_decay": 0.01, "maximize": False}
    state: list[Any] = [weights, gradients, first]
    if keys.name == "adamw":
        state += [second, [], steps]
        options |= {"eps": 1e-8, "amsgrad": False}
        options |= dict(zip(("beta1", "beta2"), keys.betas, strict=True))
    else:
        options |= {"momentum": keys.momentum, "dampening": 0.0}
        options |= {"nesterov": False, "is_first_step": False}
    return part(world, lambda: kernel(*state, **options), 0.0) / SAMPLE
