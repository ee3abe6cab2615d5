from __future__ import annotations

import ctypes
import mmap
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.node.job.ranks import agent_start
from orchestrator.node.job.ranks.agent_start import with_room

FILES, MEMORY = resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK
ENDLESS = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("nodes", "nproc", "soft", "hard", "then"),
    [
        (2, 8, 1024, 524288, 1024),  # 50 connections: as the login has it
        (10, 8, 1024, 524288, 1024),
        (11, 8, 1024, 524288, 1024 + 275),
        (1024, 8, 1024, 524288, 1024 + 25600),
        (1024, 8, 1024, 4096, 4096),  # no more than the login may have
        (1024, 8, 1024, ENDLESS, 1024 + 25600),
        (1024, 8, ENDLESS, ENDLESS, ENDLESS),
        (1024, 8, 1048576, 1048576, 1048576),
    ],
)
def test_node_0_has_room_for_all_who_ask_its_store(
    nodes: int, nproc: int, soft: int, hard: int, then: int
) -> None:
    known = [(MEMORY, 64, 64), (FILES, soft, hard)]
    assert with_room(known, nodes, nproc) == [(MEMORY, 64, 64), (FILES, then, hard)]


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
    monkeypatch.setattr(agent_start, "CUDA", str(device))
    monkeypatch.setattr(agent_start, "CONTEXT_DEVICES", (str(device), str(tmp_path / "kfd")))
    monkeypatch.setattr(agent_start, "CUDA_LIBRARY", str(cuda))
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
    assert agent_start.live_context() == ""
    fd = os.open(agent_start.CUDA_LIBRARY, os.O_RDONLY)
    try:
        with device.open():
            assert agent_start.live_context() == ""  # no CUDA is loaded
            with mmap.mmap(fd, 4096, prot=mmap.PROT_READ):
                assert agent_start.live_context() == (str(device) if held else "")
    finally:
        os.close(fd)
    assert asked == [agent_start.CUDA_LIBRARY]


def test_a_library_that_cannot_be_asked_is_no_excuse(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_start, "CUDA_LIBRARY", "libc.so")
    with device.open():
        assert agent_start.live_context() == str(device)


def test_the_device_of_rocm_is_open_for_what_computes_alone(device: Path) -> None:
    kfd = device.with_name("kfd")
    kfd.touch()
    with kfd.open():
        assert agent_start.live_context() == str(kfd)
    assert agent_start.live_context() == ""
