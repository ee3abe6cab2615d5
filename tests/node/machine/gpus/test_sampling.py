"""GPUs, from nvidia-smi and from amdgpu's files, each in its own format."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.node.machine.gpus import amd
from orchestrator.node.machine.gpus import sampling as gpus
from orchestrator.node.machine.gpus.sampling import Gpus, Nvidia

H100 = "NVIDIA H100 80GB HBM3"
# An older driver, which does not know all fields.
SMI = f"""#!/bin/sh
case "$*" in *ecc.errors.corrected*)
    echo 'Field "ecc.errors.corrected.volatile.total" is not a valid field to query.'; exit 2;; esac
echo "1, {H100}, 00000000:4F:00.0, 12, 1, 81559, 45, 120.12, 700.00, 1980, 2619, 0x0, [N/A]"
echo "0, {H100}, 00000000:19:00.0, 97, 60123, 81559, 88, 650.12, 700.00, 1200, 2619, 0x40, 0"
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi, which a test may replace."""
    (tmp_path / "bin").mkdir()
    (path := tmp_path / "bin/nvidia-smi").write_text(SMI)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return path


def test_fields_that_a_driver_does_not_know_are_left_out(smi: Path) -> None:
    nvidia = Nvidia()
    assert nvidia.sample() == {}
    assert nvidia.sample() == {
        "use": [0.97, 0.12],
        "memory_bytes": [60123 << 20, 1 << 20],
        "memory_total_bytes": [81559 << 20] * 2,
        "celsius": [88, 45],
        "watts": [650.12, 120.12],
        "watts_most": [700, 700],
        "mhz": [1200, 1980],
        "memory_mhz": [2619, 2619],
        "throttle": [0x40, 0],
        "ecc_uncorrected": [0, None],
    }
    assert nvidia.models == [H100, H100] and not nvidia.problem
    assert nvidia.places == ["0000:19:00", "0000:4f:00"]  # as the facts write them


def test_an_nvidia_smi_that_fails_is_not_asked_again_at_once(smi: Path) -> None:
    smi.write_text("#!/bin/sh\necho broken; exit 9\n")
    nvidia = Nvidia()
    assert nvidia.sample() == {} and "exit code 9: broken" in nvidia.problem
    smi.unlink()
    assert nvidia.sample() == {} and "broken" in nvidia.problem


def test_a_gpu_that_is_lost_keeps_its_place_beside_one_of_amd(smi: Path, tmp_path: Path) -> None:
    for index in range(3):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{index}:00.0").mkdir(parents=True)
    amd_card(tmp_path)
    both = Gpus(str(tmp_path))
    assert both.sample()["use"] == [None, None, None, 0.73]
    assert both.sample()["use"] == [0.97, 0.12, None, 0.73]
    assert both.models == [H100, H100, "", "AMD 0x74a1"]
    assert both.places == ["0000:19:00", "0000:4f:00", "", "0000:03:00.0"]


def test_the_files_of_amdgpu(tmp_path: Path) -> None:
    amd_card(tmp_path)
    assert amd.Sampling(str(tmp_path)).sample() == {
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
    (gpu,) = amd.gpus(str(tmp_path))
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


@pytest.mark.parametrize(
    ("word", "found"),
    [("12", 12), ("12.50", 12.5), ("[N/A]", None), ("0x0000000000000040", 64), ("ERR!", None)],
)
def test_what_nvidia_smi_writes(word: str, found: float | None) -> None:
    assert gpus.value(word, 1) == found
