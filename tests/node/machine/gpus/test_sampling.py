"""GPUs, from an nvidia-smi that goes on and from amdgpu's files, each in its own format."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from orchestrator.node.machine.gpus import amd
from orchestrator.node.machine.gpus import sampling as gpus
from orchestrator.node.machine.gpus.sampling import Gpus, Nvidia
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
H="{H100}"
while :; do
    read -r line < "$SMI_GO" || continue  # of the writer before, who has not closed it yet
    echo "1, $H, 00000000:4F:00.0, 12, 1, 81559, 45, 120.12, 700.00, 1980, 2619, 0x0, [N/A]"
    echo "0, $H, 00000000:19:00.0, 97, 60123, 81559, 88, 650.12, 700.00, 1200, 2619, 0x40, 0"
done
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
    wait_until(lambda: nvidia.sample() or (smi / "pid").exists())
    pids = set()
    for _ in range(2):
        (smi / "go").write_text("\n")
        found: dict[str, Any] = wait_until(nvidia.sample)
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
    assert nvidia.places == ["0000:19:00", "0000:4f:00"]  # as the facts write them
    assert len(pids) == 1, "it was started again"
    nvidia.stop(0.0)
    assert not alive(int(pids.pop()))


def test_an_nvidia_smi_that_is_stuck_is_given_up(smi: Path) -> None:
    nvidia = Nvidia(0.2)
    wait_until(lambda: nvidia.sample() or nvidia.problem)
    assert "says nothing for" in nvidia.problem
    assert not alive(int((smi / "pid").read_text()))
    nvidia.sample()
    assert nvidia.process is None, "not another one at once"


def test_without_nvidia_smi_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    nvidia = Nvidia(0.01)
    assert nvidia.sample() == {} and nvidia.process is None


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


def nvidia_line(index: int, use: int) -> str:
    return (
        f"{index}, {H100}, 00000000:{index:02X}:00.0, {use}, 1, 81559, 45, 120.12, 700.00, 1980,"
        " 2619, 0x0000000000000000, 0, 0\n"
    )


@pytest.mark.parametrize(
    ("says", "use"),
    [
        ([0, 1, 2], [0.0, 0.01, 0.02, 0.73]),
        ([], [None, None, None, 0.73]),  # nvidia-smi is late, stuck or not installed
        ([0, 2], [0.0, None, 0.02, 0.73]),  # one has fallen off the bus
    ],
)
def test_each_gpu_keeps_its_place_whichever_of_them_say_something(
    smi: Path, says: list[int], use: list[float | None]
) -> None:
    """Of three NVIDIA GPUs and one of AMD in one machine."""
    for index in range(3):
        (smi / f"proc/driver/nvidia/gpus/0000:0{index}:00.0").mkdir(parents=True)
    amd_card(smi)
    both = Gpus(60.0, str(smi))
    assert both.sample()["use"] == [None, None, None, 0.73]  # it starts nvidia-smi
    read, write = os.pipe()
    os.set_blocking(read, False)
    both.nvidia.stop(60.0)
    both.nvidia.process, both.nvidia.terminal = silent(), read
    os.write(write, "".join(nvidia_line(index, index) for index in says).encode())
    found = [both.sample()["use"] for _ in range(2)]
    assert use in found
    assert all(each in (use, [None, None, None, 0.73]) for each in found)
    assert both.models == [H100 if at in says else "" for at in range(3)] + ["AMD 0x74a1"]
    assert both.places[3] == "0000:03:00.0"
    assert [both.places[at] for at in says] == [f"0000:0{at}:00" for at in says]
    both.stop()
    os.close(write)


def test_a_block_that_comes_in_two_parts_is_one(smi: Path) -> None:
    for index in range(3):
        (smi / f"proc/driver/nvidia/gpus/0000:0{index}:00.0").mkdir(parents=True)
    nvidia = Nvidia(60.0, str(smi))
    read, write = os.pipe()
    os.set_blocking(read, False)
    nvidia.process, nvidia.terminal = silent(), read
    os.write(write, nvidia_line(0, 10).encode() + nvidia_line(1, 20).encode()[:30])
    assert nvidia.sample() == {}
    os.write(write, nvidia_line(1, 20).encode()[30:] + nvidia_line(2, 30).encode())
    assert nvidia.sample()["use"] == [0.1, 0.2, 0.3]
    nvidia.stop(0.0)
    os.close(write)


def silent() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "1000"], start_new_session=True)


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
