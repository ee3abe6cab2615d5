"""The loop that engine.py is compared with: the same FSDP2 calls written by hand, nothing more.

It has the same model and sizes, random tokens, no metrics and no guards. torchrun starts it; rank 0
prints the seconds of every step as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from orchestrator.config import load
from orchestrator.engine.models.build import build_model, initialise_model
from orchestrator.engine.models.decoder import Decoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", action="append", default=[])
    config = load.load_config(None, parser.parse_args().set)
    training, data = config.training, config.dataset
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    nodes, local = int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = init_device_mesh(device.type, (nodes, local), mesh_dim_names=("replicate", "shard"))
    low = torch.bfloat16 if training.mixed_precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    model = build_model(config)
    assert isinstance(model, Decoder)
    if config.compile.enabled:
        for block in model.blocks:
            block.compile()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    initialise_model(model, training.seed, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    seconds = []
    shape = (training.batch_size, data.sequence_length + 1)
    for _ in range(training.max_steps):
        began = time.perf_counter()
        tokens = torch.randint(0, config.model.vocab_size, shape, device=device)
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        found = model(batch)
        (found.loss / found.count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
