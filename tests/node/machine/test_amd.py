"""Readings from amdgpu's files in the format that its driver writes."""

from pathlib import Path

from orchestrator.node.machine import amd
from tests.node.job.trees import plant


def test_ecc_errors_sums_uncorrected(tmp_path: Path) -> None:
    top = "sys/bus/pci/devices/0000:2f:00.0/ras"
    plant(tmp_path, {
        f"{top}/umc_err_count": "ue: 2\nce: 10", f"{top}/gfx_err_count": "ue: 1\nce: 0",
        f"{top}/features": "feature mask: 0x1", f"{top}/mca_err_count": "",
    })  # fmt: skip
    assert amd.ecc_errors("0000:2f:00.0", str(tmp_path)) == 3
    assert amd.ecc_errors("0000:99:00.0", str(tmp_path)) is None


def test_processes_lists_holders_of_memory(tmp_path: Path) -> None:
    top = amd.PROCESSES[1:]
    plant(tmp_path, {f"{top}/1/vram_1": "4096", f"{top}/1/vram_2": "1", f"{top}/2/vram_1": "0"})
    (holder,) = amd.read_processes(str(tmp_path))
    assert (holder.pid, holder.used) == (1, 4097) and holder.name


def test_sampling_reads_amdgpu_files(tmp_path: Path) -> None:
    amd_card(tmp_path)
    assert amd.AmdSampling(str(tmp_path)).sample() == {
        "use": [0.73],
        "memory_bytes": [1024],
        "memory_total_bytes": [206141652992],
        "celsius": [61.0],
        "watts": [503.0],
        "watts_most": [None],
        "mhz": [2100],
        "memory_mhz": [None],
        "ecc_uncorrected": [None],
    }
    (gpu,) = amd.read_gpus(str(tmp_path))
    assert (gpu.index, gpu.model, gpu.busy, gpu.used) == (0, "AMD 0x74a1", 73, 1024)


def amd_card(tmp_path: Path) -> None:
    device = tmp_path / "sys/devices/0000:03:00.0"
    for name, text in {
        "vendor": "0x1002",
        "device": "0x74a1",
        "gpu_busy_percent": "73",
        "mem_info_vram_total": "206141652992",
        "mem_info_vram_used": "1024",
        "pp_dpm_sclk": "0: 132Mhz\n1: 2100Mhz *\n",
        "hwmon/hwmon7/power1_average": "503000000",
        "hwmon/hwmon7/temp1_input": "61000",
    }.items():
        (device / name).parent.mkdir(parents=True, exist_ok=True)
        (device / name).write_text(text + "\n")
    (tmp_path / "sys/class/drm/card1").mkdir(parents=True)
    (tmp_path / "sys/class/drm/card1/device").symlink_to(device)
    (tmp_path / "sys/class/drm/card1-DP-1").mkdir()
