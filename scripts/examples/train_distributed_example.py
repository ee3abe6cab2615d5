"""Train with torch's own DDP and DistributedSampler, under any launcher.

master_launch scripts/examples/train_distributed_example.py --epochs 10
srun python scripts/examples/train_distributed_example.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from orchestrator.distributed import cleanup_distributed, setup_distributed

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--out", default="model_distributed.pt")
args = parser.parse_args()

# Reads the variables of Slurm or torchrun; without them, one process trains alone.
info = setup_distributed()
rank, world_size, device = info["rank"], info["world_size"], torch.device(info["device"])
torch.manual_seed(0)
model: nn.Module = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
if world_size > 1:
    model = DDP(model, device_ids=[device] if device.type == "cuda" else None)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
inputs = torch.randn(1024, 10)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
    dataset, num_replicas=world_size, rank=rank
)
loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

if rank == 0:
    print(f"World size: {world_size}, Device: {device}")
for epoch in range(args.epochs):
    # Shuffles differently in each epoch.
    sampler.set_epoch(epoch)
    total = torch.zeros(2, device=device)
    for batch, labels in loader:
        loss = nn.functional.mse_loss(model(batch.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += torch.tensor([loss.item(), 1.0], device=device)
    if world_size > 1:
        dist.all_reduce(total)
    if rank == 0:
        print(f"Epoch {epoch + 1}/{args.epochs}, Average Loss: {total[0] / total[1]:.4f}")
if rank == 0:
    torch.save(getattr(model, "module", model).state_dict(), args.out)
    print("Training completed successfully!")
if world_size > 1:
    # No rank leaves before the file is written.
    dist.barrier()
cleanup_distributed()
