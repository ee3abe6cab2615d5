"""What the engine trains on: the sources of Python's own library, as bytes. Called by train.py.

Real text that every node has already, so nothing needs to be downloaded or mounted.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.config import Training
from orchestrator.errors import CheckFailed

LARGEST = 4 << 20  # bytes; reading them takes 10 ms, sending them to all ranks not much longer


def library_text() -> bytes:
    """Up to 4 MiB of the .py files that lie next to os.py, in the order of their names."""
    text = b""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= LARGEST:
            break
    return text[:LARGEST]


def shared_text(device: torch.device, least: int) -> Tensor:
    """Rank 0's text on every rank: nodes may have different Pythons, but samples must agree."""
    own = library_text() if dist.get_rank() == 0 else b""
    size = torch.tensor([len(own)], device=device)
    dist.broadcast(size, 0)
    if size.item() < least:
        raise CheckFailed(
            f"there are only {size.item()} bytes of text, and one sample needs {least}",
            "training.seq_len is too large, or this Python came without its library's sources",
        )
    text = torch.empty(int(size), dtype=torch.uint8, device=device)
    if own:
        text.copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
    dist.broadcast(text, 0)
    return text


def batch(text: Tensor, step: int, training: Training) -> tuple[Tensor, Tensor]:
    """This rank's share of one step: some bytes, and the byte that follows each of them.

    All ranks draw the step's whole batch and take their own rows, so that no two ranks see the same
    sample, and the step is the same for any number of ranks that share a batch of the same size.
    """
    own, length = training.batch_size, training.seq_len
    random = torch.Generator().manual_seed((training.seed << 32) + step)
    starts = torch.randint(text.numel() - length, (own * dist.get_world_size(),), generator=random)
    starts = starts[own * dist.get_rank() :][:own]
    rows = text[(starts[:, None] + torch.arange(length + 1)).to(text.device)].long()
    return rows[:, :-1], rows[:, 1:]
