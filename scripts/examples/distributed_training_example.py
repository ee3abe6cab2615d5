"""Train with DDP: the batch per process, the learning rate by their number, a checkpoint, metrics.

master_launch scripts/examples/distributed_training_example.py --epochs 5
python scripts/examples/distributed_training_example.py      # one process, as a baseline
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from orchestrator import Trainer
from orchestrator.distributed import cleanup_distributed, is_master_process, setup_distributed

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--checkpoint", default="checkpoint.pt", help="A directory, on every node.")
args = parser.parse_args()

info = setup_distributed()
torch.manual_seed(0)
inputs = torch.randn(400, 8)
dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
train, val = random_split(dataset, [300, 100])
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
trainer = Trainer(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    loss=nn.CrossEntropyLoss(),
    strategy="ddp",
    # Multiplies the learning rate by the number of processes.
    scale_lr=True,
    warmup_steps=5,
    accumulate=2,
    # In seconds; NCCL_TIMEOUT has no effect.
    config={"distributed": {"timeout": 1800}},
)
trainer.train(
    # The batch size is per process; the Trainer deals the samples.
    DataLoader(train, batch_size=32, shuffle=True),
    DataLoader(val, batch_size=32),
    epochs=args.epochs,
)
# Called on all ranks, as each writes its part.
trainer.save_checkpoint(args.checkpoint)
trainer.load_checkpoint(args.checkpoint)
if is_master_process():
    print(f"Metrics over {info['world_size']} processes: {trainer.state.val_metrics}")
cleanup_distributed()
