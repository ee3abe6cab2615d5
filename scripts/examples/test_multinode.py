"""Check an accelerate set-up: who is there, and is a sum over all processes right?

master_launch --accelerate-config accelerate.yaml scripts/examples/test_multinode.py
"""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator

accelerator = Accelerator()

# accelerate's own state has no number of the machine; torchrun, which it uses, has.
print(
    f"Rank {accelerator.process_index}/{accelerator.num_processes} "
    f"on node {os.environ.get('GROUP_RANK', '0')}/{os.environ.get('GROUP_WORLD_SIZE', '1')}"
)

tensor = torch.tensor([accelerator.process_index], dtype=torch.float32, device=accelerator.device)
accelerator.print(f"Before all-reduce: {tensor.item()}")
tensor = accelerator.reduce(tensor, reduction="sum")
accelerator.print(f"After all-reduce: {tensor.item()}")

expected = sum(range(accelerator.num_processes))
assert tensor.item() == expected, f"All-reduce failed! Got {tensor.item()}, expected {expected}"
accelerator.print("✅ Multi-node setup successful!")
