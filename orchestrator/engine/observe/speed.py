"""The peak FLOP/s of a device: the vendor's figure, and a matmul measured on this machine.

The two MFUs in the metrics are relative to these. A device that is not in the table has no MFU:
figures of a similar device have led to an MFU of 563%.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from typing import Any

import torch

# Dense TFLOP/s with 32-bit accumulation: bf16, fp16, tf32, fp32. The sources are the vendors' data
# sheets (nvidia.com/en-us/data-center/NAME, the architecture white papers for GeForce, and
# amd.com/en/products/accelerators/instinct). NVIDIA prints twice as much "with sparsity". The key
# is the whole name that torch.cuda.get_device_name returns, without the vendor. A variant, a MIG
# slice or a laptop GPU has other figures, so a name that is not listed here is unknown.
# The V100 and T4 have no bf16.
Figures = tuple[float | None, float | None, float | None, float | None]
DEVICES: dict[str, Figures] = {
    r"GB300": (2500, 2500, None, None),
    r"B300( SXM6( AC)?)?": (2250, 2250, None, None),
    r"GB200": (2500, 2500, None, None),
    r"B200": (2250, 2250, None, None),
    r"B100": (1750, 1750, None, None),
    r"GH200 (480GB|120GB|96GB HBM3|144G HBM3e)": (989, 989, 494, 67),
    r"H200": (989, 989, 494, 67),
    r"H200 NVL": (835, 835, 418, 60),
    r"H100 80GB HBM3": (989, 989, 494, 67),
    r"H100 PCIe": (756, 756, 378, 51),
    r"H100 NVL": (835, 835, 418, 60),
    r"H800": (989, 989, 494, 67),
    r"H800 PCIe": (756, 756, 378, 51),
    r"H20(-3e)?": (148, 148, 74, 44),
    r"A[18]00-SXM4-[48]0GB|A[18]00-PCIE-40GB|A[18]00 80GB PCIe": (312, 312, 156, 19.5),
    r"A40": (149.7, 149.7, 74.8, 37.4),
    r"A30": (165, 165, 82, 10.3),
    r"A10": (125, 125, 62.5, 31.2),
    r"A10G": (70, 70, 35, 35),
    r"RTX A6000": (154.8, 154.8, 77.4, 38.7),
    r"RTX PRO 6000 Blackwell Workstation Edition": (503.8, 503.8, 251.9, 126),
    r"RTX 6000 Ada Generation": (364.2, 364.2, 182.1, 91.1),
    r"L40S": (362, 362, 183, 91.6),
    r"L40": (181, 181, 90.5, 90.5),
    r"L20": (119.5, 119.5, 59.8, 59.8),
    r"L4": (121, 121, 60, 30.3),
    r"V100-SXM2-(16|32)GB": (None, 125, None, 15.7),
    r"V100-PCIE-(16|32)GB": (None, 112, None, 14),
    r"V100S-PCIE-32GB": (None, 130, None, 16.4),
    r"T4": (None, 65, None, 8.1),
    r"GeForce RTX 5090": (209.5, 209.5, 104.8, 104.8),
    r"GeForce RTX 4090": (165.2, 165.2, 82.6, 82.6),
    r"GeForce RTX 3090": (71, 71, 35.6, 35.6),
    r"Instinct MI355X( OAM)?": (2516.6, 2516.6, None, 157.3),
    r"Instinct MI350X( OAM)?": (2306.9, 2306.9, None, 144.2),
    r"Instinct MI325X( OAM)?": (1307, 1307, 653.7, 163.4),
    r"Instinct MI300X( OAM)?": (1307, 1307, 653.7, 163.4),
    r"Instinct MI300A": (980.6, 980.6, 490.3, 122.6),
    # These are the figures of one of its two dies, because torch sees each as a device.
    r"Instinct MI250X": (191.5, 191.5, None, 47.9),
    r"Instinct MI210": (181, 181, None, 45.3),
}
COLUMNS = ("bf16", "fp16", "tf32", "fp32")
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the vendor's FLOP/s for a device, or None if its exact name is not in the table."""
    name = re.sub(r"^(NVIDIA|Tesla|AMD)\s+", "", device_name.strip())
    for pattern, figures in DEVICES.items():
        if re.fullmatch(pattern, name, re.IGNORECASE):
            figure = dict(zip(COLUMNS, figures, strict=True)).get(dtype)
            return figure * 1e12 if figure is not None else None
    return None


def matmul_dtype(precision: str) -> str:
    """Return the dtype of matmuls under training.mixed_precision: fp32 uses tf32 if allowed."""
    allowed = torch.cuda.is_available() and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if precision == "fp32" and allowed else precision


def measured_matmul_flops(device: torch.device, dtype: str) -> float:
    """Return the best FLOP/s of several square matmuls, measured in under 0.3 s.

    Vendor figures assume clocks that a power limit may not leave: 790 of 989 TFLOP/s were measured
    on an H200. The inputs are random, because multiplying zeros draws less power and runs faster.
    """
    kind = DTYPES[dtype]
    best, until = 0.0, time.perf_counter() + 0.15
    for side in (256, 512, 1024, 2048, 4096, 8192):
        left, right = (torch.randn(side, side, device=device, dtype=kind) for _ in range(2))
        # The first matmul of a size is slow, because it chooses a kernel.
        product = left @ right
        multiply = functools.partial(torch.mm, left, right, out=product)
        seconds = min(seconds_of(multiply, device) for _ in range(3))
        best = max(best, 2 * side**3 / seconds)
        # The next size takes eight times as long, and runs four times.
        if time.perf_counter() + 32 * seconds > until:
            break
    return best


def settle_device(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], Any], device: torch.device, runs: int = 1) -> float:
    """Return the mean seconds per call of `run`, until the device has finished its work."""
    settle_device(device)
    began = time.perf_counter()
    for _ in range(runs):
        run()
    settle_device(device)
    return (time.perf_counter() - began) / runs
