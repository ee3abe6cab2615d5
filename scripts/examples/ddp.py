"""Train with DDP, by torch alone. Rank 0 saves each epoch, and a further attempt continues there.

master_launch --max-restarts 3 scripts/examples/ddp.py --epochs 20
torchrun --nproc-per-node 2 scripts/examples/ddp.py
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=64, help="Samples of one process.")
parser.add_argument("--out", type=Path, default=Path("out"))
args = parser.parse_args()

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
inputs = torch.randn(4096, 16)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
plain = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
model = DDP(plain)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

first = 0
checkpoint = args.out / "checkpoint.pt"
if checkpoint.exists():
    state = torch.load(checkpoint, map_location=device)
    plain.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["epoch"]
    print(f"rank {rank} resumes after epoch {first}")
elif rank == 0:
    print(f"training on {world} ranks from the beginning")

for epoch in range(first, args.epochs):
    # Shuffles by the epoch's number, so an epoch that is done again has the same batches.
    sampler.set_epoch(epoch)
    total = torch.zeros((), device=device)
    for batch, labels in loader:
        loss = nn.functional.mse_loss(model(batch.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach() / len(loader)
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch + 1}/{args.epochs} loss {total / world:.6f}")
        args.out.mkdir(parents=True, exist_ok=True)
        state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "epoch": epoch + 1}, checkpoint.with_suffix(".new"))
        # A rank that is killed while it writes leaves the earlier checkpoint as it was.
        checkpoint.with_suffix(".new").replace(checkpoint)
# Right behind an all-reduce, the end of a gloo group can wait for ever for its own thread.
dist.barrier()
dist.destroy_process_group()
