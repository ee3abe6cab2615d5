"""Train a classifier for a time, with the Trainer and the helpers, on any number of nodes.

master_launch scripts/examples/multi_node_example.py --max-period 2m
torchrun --nproc_per_node=2 scripts/examples/multi_node_example.py
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from orchestrator import Trainer
from orchestrator.distributed import (
    all_reduce_tensor,
    barrier,
    gather_tensors,
    get_node_info,
    is_master_node,
    is_master_process,
    setup_distributed,
)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--min-period", default="30s", help="Train at least so long.")
parser.add_argument("--max-period", default="2m", help="Train at most so long.")
args = parser.parse_args()

# Uses nccl with GPUs, else gloo.
node_info = setup_distributed()
torch.manual_seed(0)
inputs = torch.randn(512, 8)
dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
train, val = random_split(dataset, [400, 112])
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
trainer = Trainer(
    model,
    torch.optim.Adam(model.parameters(), lr=1e-3),
    loss=nn.CrossEntropyLoss(),
    strategy="ddp",
)

if is_master_process():
    print(f"Training on {node_info['world_size']} processes, {node_info['num_nodes']} nodes")
    print(f"Node rank: {node_info['node_rank']}, device: {node_info['device']}")

history = trainer.train(
    DataLoader(train, batch_size=32, shuffle=True),
    DataLoader(val, batch_size=32),
    min_period=args.min_period,
    max_period=args.max_period,
    # True on all ranks would print the same, as only rank 0 prints.
    verbose=is_master_process(),
)

barrier()
own = torch.tensor(float(get_node_info()["rank"]))
mean = all_reduce_tensor(own, op="mean")
# All ranks call it: under `if is_master_process()` it would hang.
every = gather_tensors(own)
if is_master_process() and is_master_node():
    print(f"Gathered {len(every)} tensors, their mean is {mean.item()}")
    print(f"Trained {len(history)} epochs, {trainer.state.step} steps")
