"""Train a LightningModule with DDP; it continues from the last checkpoint of its callback.

master_launch --max-restarts 3 scripts/examples/lightning_ddp.py --epochs 20
"""

from __future__ import annotations

import argparse
import os

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--out", default="out")
args = parser.parse_args()


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics["loss"]
        self.print(f"epoch {self.current_epoch + 1}/{args.epochs} loss {loss:.6f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0)
inputs = torch.randn(4096, 16)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())
trainer = lightning.Trainer(
    accelerator="gpu" if torch.cuda.is_available() else "cpu",
    # Both numbers are those of the launch.
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    num_nodes=int(os.environ.get("NNODES", "1")),
    strategy="ddp",
    max_epochs=args.epochs,
    callbacks=[ModelCheckpoint(args.out, save_last=True)],
    logger=False,
    enable_progress_bar=False,
)
# Begins from nothing as long as there is no last checkpoint.
trainer.fit(Model(), DataLoader(dataset, batch_size=64, shuffle=True), ckpt_path="last")
if trainer.is_global_zero:
    print(f"{trainer.global_step} steps on {trainer.world_size} ranks")
