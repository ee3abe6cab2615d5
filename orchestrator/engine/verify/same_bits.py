"""Repeat seeded products and reductions on this device, and keep hashes of their bits.

The same device model with the same libraries gives the same bits for the same numbers, every time.
One that does not computes wrongly, or its memory does, though no error was ever raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from orchestrator.engine.ranks.agreement import hash_there

SEED = 20260101
GPU, CPU = 4096, 384  # rows and columns
LEAST = 3  # rounds: one alone says nothing of its device
Case = Callable[[], Tensor]


def cases(device: torch.device) -> dict[str, Case]:
    """Name what is computed; the operands are drawn on the CPU, the same everywhere."""
    size = GPU if device.type == "cuda" else CPU
    generator = torch.Generator().manual_seed(SEED)
    a, b = (torch.randn(size, size, generator=generator).to(device) for _ in range(2))

    def product(dtype: torch.dtype) -> Case:
        left, right = a.to(dtype), b.to(dtype)
        return lambda: left @ right

    kinds = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
    if device.type == "cuda":
        kinds["fp16"] = torch.float16
    return {
        **{f"product of {name} matrices": product(dtype) for name, dtype in kinds.items()},
        "sums of columns": lambda: a.sum(0),
        "softmax of rows": lambda: torch.softmax(a, -1),
        "sorted numbers": lambda: a.flatten().sort().values,
        "copy in memory": a.clone,
    }


def measure(
    device: torch.device, seconds: float, computed: Mapping[str, Case] | None = None
) -> tuple[dict[str, list[int]], int]:
    """Give for each case every hash that was seen, the first one first, and the rounds."""
    computed = cases(device) if computed is None else computed
    seen: dict[str, list[int]] = {name: [] for name in computed}
    rounds, began = 0, time.monotonic()
    while rounds < LEAST or time.monotonic() - began < seconds:
        hashes = {name: hash_there(compute()) for name, compute in computed.items()}
        for name, value in hashes.items():
            if int(value) not in seen[name]:
                seen[name].append(int(value))
        rounds += 1
    return seen, rounds


def prepare(device: torch.device) -> None:
    """Take the one way of computing that always rounds alike."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    else:
        torch.set_num_threads(1)  # so many threads, so many partial sums


def kind_of(device: torch.device) -> str:
    """Name all that decides on the bits: devices of one kind are compared."""
    if device.type == "cuda":
        parts = torch.cuda.get_device_properties(device)
        libraries = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm"
        units = f"{parts.multi_processor_count} units"
        return f"{parts.name}, {units}, torch {torch.__version__}, {libraries}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{processor()}, {capability}, torch {torch.__version__}"


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "CPU"
    names = (line.partition(":")[2].strip() for line in text.splitlines()
             if line.startswith(("model name", "CPU part")))  # fmt: skip
    return next(names, "CPU")
