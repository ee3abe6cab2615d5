"""GPUs, from an nvidia-smi that goes on and from amdgpu's files, each in its own format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from orchestrator.node.metrics import gpus
from orchestrator.node.metrics.gpus import Amd, Nvidia
from tests.node.running import alive, wait_until

H100 = "NVIDIA H100 80GB HBM3"
# Drivers before 555 write the first, those after 560 know the second name only.
SMI = f"""#!/bin/sh
case "$*" in *clocks_throttle_reasons.active*)
    echo 'Field "clocks_throttle_reasons.active" is not a valid field to query.'; exit 2;; esac
case "$*" in *ecc.errors.corrected*)
    echo 'Field "ecc.errors.corrected.volatile.total" is not a valid field to query.'; exit 2;; esac
case "$*" in *--loop=*) ;; *) exit 3;; esac
echo $$ > "$SMI_PID"
while read -r line < "$SMI_GO"; do
    echo "1, {H100}, 12, 1, 81559, 45, 120.12, 700.00, 1980, 2619, 0x0000000000000000, [N/A]"
    echo "0, {H100}, 97, 60123, 81559, 88, 650.12, 700.00, 1200, 2619, 0x0000000000000040, 0"
done
sleep 1000
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi that says a block of lines for each line written to the FIFO `go`."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text(SMI)
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    os.mkfifo(tmp_path / "go")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SMI_GO", str(tmp_path / "go"))
    monkeypatch.setenv("SMI_PID", str(tmp_path / "pid"))
    return tmp_path


def test_one_nvidia_smi_goes_on_without_what_it_does_not_know(smi: Path) -> None:
    nvidia = Nvidia(60.0)
    wait_until(lambda: nvidia.look() or (smi / "pid").exists())
    pids = set()
    for _ in range(2):
        (smi / "go").write_text("\n")
        found: dict[str, Any] = wait_until(nvidia.look)
        assert found == {
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
        pids.add((smi / "pid").read_text())
    assert nvidia.models == [H100, H100] and not nvidia.problem
    assert len(pids) == 1, "it was started again"
    nvidia.stop(0.0)
    assert not alive(int(pids.pop()))


def test_an_nvidia_smi_that_is_stuck_is_given_up(smi: Path) -> None:
    nvidia = Nvidia(0.2)
    wait_until(lambda: nvidia.look() or nvidia.problem)
    assert "says nothing for" in nvidia.problem
    assert not alive(int((smi / "pid").read_text()))
    nvidia.look()
    assert nvidia.process is None, "not another one at once"


def test_without_nvidia_smi_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    nvidia = Nvidia(0.01)
    assert nvidia.look() == {} and nvidia.process is None


def test_the_files_of_amdgpu(tmp_path: Path) -> None:
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
    assert Amd(str(tmp_path)).look() == {
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


@pytest.mark.parametrize(
    ("word", "found"),
    [("12", 12), ("12.50", 12.5), ("[N/A]", None), ("0x0000000000000040", 64), ("ERR!", None)],
)
def test_what_nvidia_smi_writes(word: str, found: float | None) -> None:
    assert gpus.value(word, 1) == found
