"""Train with accelerate's own loop; all ranks save, and a further attempt continues there.

master_launch --start-with accelerate --max-restarts 3 scripts/examples/accelerate_loop.py
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--out", type=Path, default=Path("out"))
args = parser.parse_args()

# With it, an epoch that is done again has the same batches.
shuffling = DataLoaderConfiguration(use_seedable_sampler=True)
accelerator = Accelerator(dataloader_config=shuffling)
set_seed(0)
inputs = torch.randn(4096, 16)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(dataset, batch_size=64, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

first = 0
# Names the newest state that is whole.
latest = args.out / "latest"
if latest.exists():
    first = int(latest.read_text())
    accelerator.load_state(str(args.out / f"epoch_{first}"))
    print(f"rank {accelerator.process_index} resumes after epoch {first}")

for epoch in range(first, args.epochs):
    loader.set_epoch(epoch)
    total = torch.zeros((), device=accelerator.device)
    for batch, labels in loader:
        loss = nn.functional.mse_loss(model(batch), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach() / len(loader)
    mean = accelerator.reduce(total, reduction="mean")
    if accelerator.is_main_process:
        print(f"epoch {epoch + 1}/{args.epochs} loss {mean:.6f}")
    accelerator.save_state(str(args.out / f"epoch_{epoch + 1}"))
    # Every rank has written its part before the state counts.
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        latest.with_suffix(".new").write_text(str(epoch + 1))
        latest.with_suffix(".new").replace(latest)
    if accelerator.is_local_main_process:
        # The state before this one stays: `latest` may name it still.
        shutil.rmtree(args.out / f"epoch_{epoch - 1}", ignore_errors=True)
accelerator.end_training()
