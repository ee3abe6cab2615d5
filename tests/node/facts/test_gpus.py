from __future__ import annotations

from pathlib import Path

from orchestrator.node.facts import gpus
from orchestrator.protocol.facts import Card
from tests.node.job.trees import plant

INFORMATION = """Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t 301
GPU UUID: \t GPU-6c35a82c-6ee1-5a9b-1b5a-2f6f7ad4f9a1
Video BIOS: \t 96.00.74.00.01
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t 0000:1b:00.0
Device Minor: \t 0
GPU Firmware: \t 550.127.05
GPU Excluded:\t No"""


def test_nvidia_devices_are_counted(tmp_path: Path) -> None:
    names = ["nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-modeset", "null"]
    plant(tmp_path, {f"dev/{name}": "" for name in names})
    assert gpus.gpu_count(str(tmp_path)) == 3


def test_amd_devices_are_counted_without_their_cpus(tmp_path: Path) -> None:
    nodes = {
        "0": "cpu_cores_count 64\nsimd_count 0\n",
        "1": "simd_count 304\n",
        "2": "simd_count 304",
    }
    top = "sys/class/kfd/kfd/topology/nodes"
    plant(tmp_path, {f"{top}/{node}/properties": text for node, text in nodes.items()})
    assert gpus.gpu_count(str(tmp_path)) == 2


def test_a_machine_without_any(tmp_path: Path) -> None:
    assert gpus.gpu_count(str(tmp_path)) == 0
    assert gpus.cards(str(tmp_path)) == []


def test_nvidia_cards_by_the_drivers_own_files(tmp_path: Path) -> None:
    top = "proc/driver/nvidia/gpus"
    unknown = "Model: \t\t Unknown\nGPU UUID: \t GPU-????????-????-????-????-????????????"
    plant(
        tmp_path,
        {
            f"{top}/0000:1b:00.0/information": INFORMATION,
            f"{top}/0000:43:00.0/information": unknown,
        },
    )
    first, second = gpus.cards(str(tmp_path))
    assert first == Card(
        "nvidia", "NVIDIA H100 80GB HBM3", "GPU-6c35a82c-6ee1-5a9b-1b5a-2f6f7ad4f9a1",
        "0000:1b:00.0",
    )  # fmt: skip
    assert (second.model, second.uuid) == ("Unknown", "")


def test_amd_cards_by_sysfs(tmp_path: Path) -> None:
    """A card of another maker, an output of a card, and a driver that tells no name."""
    device = tmp_path / "sys/devices/0000:c1:00.0"
    plant(device, {
        "vendor": "0x1002", "device": "0x74a1", "mem_info_vram_total": "206141652992",
        "mem_info_vram_used": "299032576", "product_name": "AMD Instinct MI300X OAM",
        "unique_id": "8e6b0a5ef2a9d3c1",
    })  # fmt: skip
    drm = tmp_path / "sys/class/drm"
    for name in ("card1", "card1-DP-1", "renderD128"):
        (drm / name).mkdir(parents=True)
        (drm / name / "device").symlink_to(device)
    plant(drm, {"card0/device/vendor": "0x1a03", "card2/device/vendor": "0x1002"})
    plant(drm / "card3/device", {
        "vendor": "0x1002", "device": "0x740c", "mem_info_vram_total": "68702699520"})  # fmt: skip
    first, second = gpus.cards(str(tmp_path))
    assert first == Card(
        "amd", "AMD Instinct MI300X OAM", "8e6b0a5ef2a9d3c1", "0000:c1:00.0", 206141652992,
        299032576,
    )  # fmt: skip
    assert (second.model, second.memory, second.used) == ("AMD 0x740c", 68702699520, None)
