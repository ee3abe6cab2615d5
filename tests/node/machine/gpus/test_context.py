"""A process that computes on a GPU is told from one that has only counted them."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.node.machine.gpus import context

BEGUN, NOT_YET = 0, 3


def library(answer: int) -> Any:
    """What libcuda.so.1 says to cuDeviceGetCount: CUDA_SUCCESS, or CUDA_ERROR_NOT_INITIALIZED."""
    return SimpleNamespace(cuDeviceGetCount=lambda count: answer)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in place of the device, and one in the memory of this process as CUDA's library."""
    device, cuda = tmp_path / "nvidia-uvm", tmp_path / "libcuda.so.580.159.04"
    device.touch()
    cuda.write_bytes(bytes(4096))
    monkeypatch.setattr(context, "CUDA", str(device))
    monkeypatch.setattr(context, "DEVICES", (str(device), str(tmp_path / "kfd")))
    monkeypatch.setattr(context, "LIBRARY", str(cuda))
    return device


@pytest.mark.parametrize(("answer", "held"), [(BEGUN, True), (NOT_YET, False)])
def test_what_counts_gpus_may_be_forked(
    device: Path, monkeypatch: pytest.MonkeyPatch, answer: int, held: bool
) -> None:
    """NVML opens /dev/nvidia-uvm and loads libcuda.so since driver 580, and begins nothing."""
    asked = []

    def loaded(path: str) -> Any:
        asked.append(path)
        return library(answer)

    monkeypatch.setattr(ctypes, "CDLL", loaded)
    assert context.held() == ""
    fd = os.open(context.LIBRARY, os.O_RDONLY)
    try:
        with device.open():
            assert context.held() == ""  # no CUDA is loaded
            with mmap.mmap(fd, 4096, prot=mmap.PROT_READ):
                assert context.held() == (str(device) if held else "")
    finally:
        os.close(fd)
    assert asked == [context.LIBRARY]


def test_a_library_that_cannot_be_asked_is_no_excuse(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "LIBRARY", "libc.so")
    with device.open():
        assert context.held() == str(device)


def test_the_device_of_rocm_is_open_for_what_computes_alone(device: Path) -> None:
    kfd = device.with_name("kfd")
    kfd.touch()
    with kfd.open():
        assert context.held() == str(kfd)
    assert context.held() == ""
