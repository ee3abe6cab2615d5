"""The built-in training run, one process per rank. Read it from top to bottom.

A small language model learns Python's own sources, with its parameters spread over the ranks by
FSDP2. Started by torchrun on every node: through `master_launch` without a script, or by hand as
`torchrun ... -m orchestrator.engine.train --config FILE`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from orchestrator import config as settings
from orchestrator.config import Config
from orchestrator.engine.data import batch, shared_text
from orchestrator.engine.model import Decoder, initialise
from orchestrator.errors import CheckFailed

try:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
except ImportError:
    raise CheckFailed(f"the engine needs torch 2.6, here is {torch.__version__}") from None


def main() -> None:
    config = read_config()
    training, optimizer = config.training, config.optimizer

    # -- who and where ------------------------------------------------------------------------

    device = own_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")  # env:// of torchrun
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = make_mesh(device, config.fsdp.sharding_strategy)

    # -- the model ----------------------------------------------------------------------------

    # Whole on the CPU first, equal on every rank; sharding then keeps a slice of it. If each rank
    # drew its own slice, the numbers would depend on the mesh, or be the same in every slice.
    model = Decoder(config.model)
    initialise(model, config.model, training.seed)
    parameters = sum(weight.numel() for weight in model.parameters())
    model.to(device)
    shard(model, mesh)
    adamw = torch.optim.AdamW(model.parameters(), weight_decay=optimizer.weight_decay)

    # -- the text -----------------------------------------------------------------------------

    text = shared_text(device, training.seq_len + 1)
    tokens_per_step = world * training.batch_size * training.seq_len

    say(f"{describe(mesh, device)}; {parameters:,} parameters")
    say(
        f"{training.max_steps} steps of {world} x {training.batch_size} sequences of"
        f" {training.seq_len} bytes, from {text.numel() / 1e6:.1f} MB of Python's own sources"
    )

    # -- the loop -----------------------------------------------------------------------------

    # SIGTERM is how a stop arrives, on every node at its own moment. From here on it is only noted:
    # a rank that left at once would leave the others in the middle of a step.
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))

    with metrics_file(rank) as metrics:
        began = last = time.perf_counter()
        for step in range(1, training.max_steps + 1):
            lr = learning_rate(step, training.max_steps, optimizer.lr)
            for group in adamw.param_groups:
                group["lr"] = lr

            inputs, targets = batch(text, step, training)
            loss = model(inputs, targets)
            loss.backward()  # FSDP leaves the mean over all ranks in .grad
            grad_norm = clip(model, optimizer.grad_clip)
            adamw.step()
            adamw.zero_grad()

            # The loss of the whole step, and whether anybody was asked to stop: one message, and
            # the only point at which a step waits for the device.
            shared = torch.stack((loss.detach(), loss.new_tensor(float(bool(asked)))))
            dist.all_reduce(shared)
            loss_sum, stops = shared.tolist()
            mean_loss = loss_sum / world

            now = time.perf_counter()
            seconds, last = now - last, now
            record = {
                "step": step,
                "loss": mean_loss,
                "lr": lr,
                "grad_norm": grad_norm.item(),
                "tokens": step * tokens_per_step,  # so far, of all ranks together
                "tokens_per_s": tokens_per_step / seconds,
                "step_ms": seconds * 1e3,
            }
            if metrics is not None:
                metrics.write(json.dumps(record) + "\n")
            if step == 1:
                began = now  # the first step pays for set-up; the estimate leaves it out
            if step % training.log_every == 0 or step in (1, training.max_steps) or stops:
                say(progress(record, training.max_steps, now - began))
            if stops:
                say(f"asked to stop: all ranks end together after step {step}")
                break
            if not math.isfinite(mean_loss):
                raise CheckFailed(f"the loss is {mean_loss} at step {step}", "try a smaller lr")

    dist.destroy_process_group()


# -- the parts of it, in the order in which they are used -----------------------------------------


def read_config() -> Config:
    """What the launch resolved, from the run directory on this node; by hand, from a YAML file."""
    parser = argparse.ArgumentParser(description="Train the built-in model.")
    parser.add_argument("--config", type=Path, help="a YAML file (needs PyYAML)")
    file = parser.parse_args().config
    run = os.environ.get("ORCHESTRATOR_RUN")
    if file is None and run:
        spec = json.loads(Path(run, "spec.json").read_text(encoding="ascii"))
        return settings.build(Config, spec["config"], "")
    return settings.load(file) if file else Config()


def own_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= count:
        raise CheckFailed(
            f"local rank {local} has no GPU of its own: there are {count}",
            f"start {count} ranks on this node: slots={count} in the list, or --nproc {count}",
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def make_mesh(device: torch.device, strategy: str) -> DeviceMesh:
    """full_shard: one dimension. hybrid_shard: parameters are sharded within a node, where links
    are fast, and replicated across nodes: dim 0 replicates, dim 1 shards, as in PyTorch."""
    world, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    if strategy == "full_shard":
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    # All ranks must come to the same answer, or those that go on would wait for the others.
    largest = torch.tensor([local], device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    nodes = int(os.environ["GROUP_WORLD_SIZE"])
    if int(largest) * nodes != world:
        raise CheckFailed(
            f"hybrid_shard needs the same number of ranks on every node; here {nodes} nodes have"
            f" {world} together and up to {int(largest)} each",
            "make them equal with slots= in the list, or use fsdp.sharding_strategy=full_shard",
        )
    return init_device_mesh(device.type, (nodes, local), mesh_dim_names=("replicate", "shard"))


def shard(model: Decoder, mesh: DeviceMesh) -> None:
    """Block by block, so that only one block's parameters are whole at a time; then the rest."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Up over the first twentieth, then down a cosine to a tenth of the peak."""
    warmup = max(1, steps // 20)
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * done))


def clip(model: nn.Module, most: float) -> Tensor:
    """Scale the gradients down to a norm of at most `most` (0: leave them); their norm before.

    Each rank holds slices: its own norm is not the norm. full_tensor() adds them up over the mesh.
    """
    weights = list(model.parameters())
    norm = nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if most:
        nn.utils.clip_grads_with_norm_(weights, most, norm)
    return norm


@contextlib.contextmanager
def metrics_file(rank: int) -> Iterator[TextIO | None]:
    """One line of JSON per step. Without an experiment (torchrun by hand) there is none."""
    experiment = os.environ.get("ORCHESTRATOR_EXPERIMENT")
    if not experiment:
        yield None
        return
    path = Path(experiment, "outputs", f"rank_{rank:02d}_metrics.jsonl")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # a node may not share the head's disk
        file = path.open("w", buffering=1, encoding="ascii")
    except OSError as error:
        sys.stderr.write(f"no metrics of rank {rank}: {path}: {error.strerror}\n")
        yield None
        return
    with file:
        yield file


def describe(mesh: DeviceMesh, device: torch.device) -> str:
    names = mesh.mesh_dim_names or ()
    shape = " x ".join(f"{name} {size}" for name, size in zip(names, mesh.shape, strict=True))
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"mesh {shape} on {kind} over {dist.get_backend()}"


def progress(record: dict[str, Any], steps: int, elapsed: float) -> str:
    step = record["step"]
    left = elapsed / (step - 1) * (steps - step) if step > 1 else float("nan")
    estimate = f"{left // 60:.0f} min {left % 60:.0f} s" if left >= 60 else f"{left:.0f} s"
    return (
        f"step {step:>{len(str(steps))}}/{steps}  loss {record['loss']:.4f}"
        f"  lr {record['lr']:.2e}  grad norm {record['grad_norm']:.3f}"
        f"  {record['tokens_per_s']:,.0f} tokens/s  {record['step_ms']:.0f} ms/step"
        + (f"  {estimate} left" if 1 < step < steps else "")
    )


def say(text: str) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
