"""Train your own model with the Trainer of this package; it continues by itself.

master_launch --max-restarts 3 scripts/examples/trainer.py --epochs 20
python scripts/examples/trainer.py      # one process, as a baseline
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from orchestrator import Trainer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
args = parser.parse_args()

torch.manual_seed(0)
inputs = torch.randn(4096, 16)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
trainer = Trainer(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-2),
    loss=nn.MSELoss(),
    # A kill costs at most this many steps; without it, the clock decides.
    config={"checkpoint": {"memory_every": 10}},
)
trainer.train(
    DataLoader(dataset, batch_size=64, shuffle=True),
    epochs=args.epochs,
    save_every="1 epoch",
    resume=True,
)
trainer.save("model.safetensors")
