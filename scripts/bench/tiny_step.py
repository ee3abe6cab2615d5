"""Measure the host's cost of a step: a model so small that nothing else counts, beside others.

    python scripts/bench/tiny_step.py [--only REGEX] [--cuda]
    python scripts/bench/tiny_step.py --width 1024 --batch 256 --steps 400    # a middling model

Prints the milliseconds per step, of every twenty steps, as JSON: of processor time, or of the clock
with --cuda, as who waits for a GPU spins. All that can be imported train in turns, each in a
process of its own, forked from one that has imported everything. They have the same model, data,
loss and optimizer, and clip gradients.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

WINDOW = 20
SIZES = {"width": 32, "batch": 32}
DEVICE = "cuda" if "--cuda" in sys.argv else "cpu"
# The processor time at which each step's forward began.
began: list[float] = []


class Tiny(nn.Sequential):
    """Three layers, which note when they are called."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        width = SIZES["width"]
        hidden = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        super().__init__(*hidden, nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        began.append(time.perf_counter() if DEVICE == "cuda" else time.process_time())
        result: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return result


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def batches(steps: int) -> DataLoader[tuple[Tensor, ...]]:
    batch = SIZES["batch"]
    x, y = torch.randn(steps * batch, 64), torch.randint(0, 10, (steps * batch,))
    return DataLoader(TensorDataset(x, y), batch, shuffle=True)


# -- the contenders --------------------------------------------------------------------------------


def by_hand(steps: int, *, clips: bool = False) -> None:
    model = Tiny().to(DEVICE)
    optimizer = adamw(model)
    for x, y in batches(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def clipped(steps: int) -> None:
    by_hand(steps, clips=True)


def orchestrator(steps: int) -> None:
    from orchestrator import Trainer

    model = Tiny()
    trainer = Trainer(model, adamw(model), nn.CrossEntropyLoss(), clip_grad_norm=1.0)
    trainer.train(batches(steps), epochs=1, verbose=False)


def accelerate(steps: int) -> None:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=DEVICE == "cpu"), Tiny()
    model, optimizer, loader = accelerator.prepare(model, adamw(model), batches(steps))
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(functional.cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def transformers(steps: int) -> None:
    from transformers import Trainer, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Tiny()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            outputs = self.inner(x)
            return {"loss": functional.cross_entropy(outputs, labels), "logits": outputs}

    def collate(samples: list[Any]) -> dict[str, Tensor]:
        x, y = zip(*samples, strict=True)
        return {"x": torch.stack(x), "labels": torch.stack(y)}

    model = WithLoss()
    with tempfile.TemporaryDirectory() as place:
        arguments = TrainingArguments(
            place,
            per_device_train_batch_size=SIZES["batch"],
            num_train_epochs=1,
            max_grad_norm=1.0,
            logging_steps=50,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=DEVICE == "cpu",
            dataloader_pin_memory=False,
        )
        data: Any = batches(steps).dataset
        Trainer(model, arguments, collate, data, optimizers=(adamw(model), None)).train()


def lightning(steps: int) -> None:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = Tiny()

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y = batch
            return functional.cross_entropy(self.inner(x), y)

        def configure_optimizers(self) -> Any:
            return adamw(self)

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator=DEVICE,
        devices=1,
        gradient_clip_val=1.0,
        **dict.fromkeys(quiet, False),
    )
    trainer.fit(Module(), batches(steps))


def fabric(steps: int) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=DEVICE, devices=1)
    model = Tiny()
    wrapped, optimizer = fabric.setup(model, adamw(model))
    for x, y in fabric.setup_dataloaders(batches(steps)):
        optimizer.zero_grad()
        fabric.backward(functional.cross_entropy(wrapped(x), y))
        fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)
        optimizer.step()


# Each contender with the package that it needs.
CONTENDERS: dict[str, tuple[str, Callable[[int], None]]] = {
    "hand-written loop": ("torch", by_hand),
    "hand-written loop that clips": ("torch", clipped),
    "orchestrator.Trainer": ("orchestrator", orchestrator),
    "accelerate": ("accelerate", accelerate),
    "HF Trainer": ("transformers", transformers),
    "Lightning": ("lightning", lightning),
    "Fabric": ("lightning", fabric),
}


def turn(name: str, steps: int) -> list[float]:
    """Train in a process of its own; return the milliseconds of a step in each window."""
    receive, send = multiprocessing.Pipe(duplex=False)

    def train() -> None:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        CONTENDERS[name][1](steps)
        # The first steps warm up.
        marks = began[100::WINDOW]
        send.send([1e3 * (b - a) / WINDOW for a, b in itertools.pairwise(marks)])

    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    send.close()
    try:
        windows: list[float] = receive.recv()
    except EOFError:
        windows = []
    process.join()
    return windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", default="", help="a regular expression of contenders")
    parser.add_argument("--cuda", action="store_true", help="train on the GPU")
    for size, usual in SIZES.items():
        parser.add_argument(f"--{size}", type=int, default=usual)
    options = parser.parse_args()
    SIZES.update(width=options.width, batch=options.batch)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    for name, (package, _) in CONTENDERS.items():
        if re.search(options.only, name) and importlib.util.find_spec(package):
            importlib.import_module(package)
            found[name] = []
    for _ in range(options.repeat):
        for name in found:
            found[name] += turn(name, options.steps)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
