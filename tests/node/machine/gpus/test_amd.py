"""What amdgpu's files tell, as its driver writes them."""

from __future__ import annotations

from pathlib import Path

from orchestrator.node.machine.gpus import amd
from tests.node.job.trees import plant


def test_errors_of_memory(tmp_path: Path) -> None:
    top = "sys/bus/pci/devices/0000:2f:00.0/ras"
    plant(tmp_path, {
        f"{top}/umc_err_count": "ue: 2\nce: 10", f"{top}/gfx_err_count": "ue: 1\nce: 0",
        f"{top}/features": "feature mask: 0x1", f"{top}/mca_err_count": "",
    })  # fmt: skip
    assert amd.ecc_errors("0000:2f:00.0", str(tmp_path)) == 3
    assert amd.ecc_errors("0000:99:00.0", str(tmp_path)) is None


def test_who_has_memory(tmp_path: Path) -> None:
    top = amd.PROCESSES[1:]
    plant(tmp_path, {f"{top}/1/vram_1": "4096", f"{top}/1/vram_2": "1", f"{top}/2/vram_1": "0"})
    (holder,) = amd.processes(str(tmp_path))
    assert (holder.pid, holder.used) == (1, 4097) and holder.name
