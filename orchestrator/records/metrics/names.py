"""Tells by a metric's name its unit, and which of its values is the best."""

from __future__ import annotations

import re

from orchestrator.common.text import size

# Words of a metric's name that tell which of its values is the best.
LEAST = {"loss", "err", "error", "ppl", "perplexity", "ms", "seconds", "wer", "cer", "fid", "mae",
         "mse", "rmse", "nll", "bpb"}  # fmt: skip
MOST = {"acc", "acc1", "acc5", "accuracy", "f1", "auc", "iou", "miou", "map", "psnr", "ssim",
        "bleu", "rouge", "reward", "return", "score", "mfu", "recall", "precision", "top1",
        "top5"}  # fmt: skip
WORDS = {
    "step_ms": "step time",
    "data_ms": "waiting for data",
    "forward_backward_ms": "forward and backward",
    "optimizer_ms": "optimizer",
    "exposed_comm_ms": "exposed communication",
    "tokens_per_s": "speed",
    "memory_peak_bytes": "peak memory",
    "memory_bytes": "memory now",
    "mfu": "MFU, against the vendor's peak",
    "mfu_measured": "MFU, against measured peak",
}
RATIOS = ("mfu", "mfu_measured")
UNITS = {"_ms": "ms", "seconds": "s", "_bytes": "bytes", "_per_s": "/s"}  # by a name's end


def unit_of(name: str) -> str:
    if name in RATIOS:
        return "ratio"
    return next((unit for end, unit in UNITS.items() if name.endswith(end)), "")


def better(name: str) -> str:
    """Tell from a metric's name whether its best value is the least or the most."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if words & LEAST:
        return "least"
    return "most" if words & MOST or name.endswith("_per_s") else ""


def in_thousands(value: float) -> str:
    """Write a count in a few characters: 415k, 1.2M."""
    return size(value).removesuffix("B").replace(" ", "")
