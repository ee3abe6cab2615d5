"""Tells whether this process computes on a GPU: a process that is forked from it then cannot.

Imports nothing of ours: a rank, and what waits to become one, load it by its path.
"""

from __future__ import annotations

import ctypes
import os

CUDA = "/dev/nvidia-uvm"
DEVICES = (CUDA, "/dev/kfd")  # what a live context of CUDA or ROCm holds open
LIBRARY = "libcuda.so"
NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def held() -> str:
    """Return the device that a live context holds open, or nothing."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the listing's own
            continue
        if link in DEVICES and not (link == CUDA and only_counts()):
            return link
    return ""


def only_counts() -> bool:
    """Tell whether CUDA has not begun: NVML, which counts GPUs, opens its device as well.

    Until somebody initialises CUDA, its library refuses every question.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        paths = {line.split(None, 5)[5].strip() for line in file if LIBRARY in line}
    count = ctypes.c_int()
    try:
        return all(
            ctypes.CDLL(path).cuDeviceGetCount(ctypes.byref(count)) == NOT_INITIALIZED
            for path in paths
        )
    except (OSError, AttributeError):
        return False
