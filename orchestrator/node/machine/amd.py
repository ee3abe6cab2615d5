"""Reads the state of AMD GPUs from amdgpu's files; a missing value is None. No tool is needed."""

from __future__ import annotations

import re
from typing import Union

from orchestrator.node.machine import sysfs
from orchestrator.protocol.facts import Card, Gpu, Holder

VENDOR = "0x1002"
PROCESSES = "/sys/class/kfd/kfd/proc"

Number = Union[int, float, None]


def read_gpus(root: str = "") -> list[Gpu]:
    """Return the cards with their present load."""
    driver = sysfs.read_text(f"{root}/sys/module/amdgpu/version")
    return [
        Gpu(
            index=index,
            driver=driver,
            busy=sysfs.read_number(f"{device}/gpu_busy_percent"),
            ecc_errors=ecc_errors(card.pci, root),
            **vars(card),
        )
        for index, (device, card) in enumerate(zip(card_directories(root), read_cards(root)))
    ]


def read_processes(root: str = "") -> list[Holder]:
    """Return the processes with memory on some card: KFD has a directory for each process."""
    found = []
    for pid in filter(str.isdigit, sysfs.list_names(f"{root}{PROCESSES}")):
        top = f"{root}{PROCESSES}/{pid}"
        files = [name for name in sysfs.list_names(top) if name.startswith("vram_")]
        used = sum(sysfs.read_number(f"{top}/{name}") or 0 for name in files)
        if used:
            name = sysfs.read_text(f"/proc/{pid}/comm")
            found.append(Holder(pid=int(pid), gpu="", used=used, name=name))
    return found


def ecc_errors(pci: str, root: str = "") -> int | None:
    """Return the sum of all blocks' uncorrected errors (`ue: 0`); None if the card counts none."""
    top = f"{root}/sys/bus/pci/devices/{pci}/ras"
    counts = [
        int(match.group(1))
        for name in sysfs.list_names(top)
        for match in [re.search(r"^ue: (\d{1,15})", sysfs.read_text(f"{top}/{name}"), re.MULTILINE)]
        if name.endswith("_err_count") and match
    ]
    return sum(counts) if counts else None


def count_gpus(root: str = "") -> int:
    """Return the number of GPUs: KFD lists CPUs as nodes as well, but only GPUs have SIMD units."""
    nodes = f"{root}/sys/class/kfd/kfd/topology/nodes"
    texts = (sysfs.read_text(f"{nodes}/{node}/properties") for node in sysfs.list_names(nodes))
    return sum(bool(re.search(r"^simd_count [1-9]", text, re.MULTILINE)) for text in texts)


def card_directories(root: str = "") -> list[str]:
    """Return the directories of the cards that amdgpu drives, in order of their numbers."""
    top = f"{root}/sys/class/drm"
    names = [name for name in sysfs.list_names(top) if re.fullmatch(r"card\d+", name)]
    paths = [f"{top}/{name}/device" for name in sorted(names, key=lambda name: int(name[4:]))]
    return [path for path in paths if is_driven(path)]


def is_driven(device: str) -> bool:
    """Return True for a card of AMD that amdgpu drives."""
    memory = sysfs.read_number(f"{device}/mem_info_vram_total")
    return memory is not None and sysfs.read_text(f"{device}/vendor") == VENDOR


def read_cards(root: str = "") -> list[Card]:
    """Return the cards from sysfs, memory in bytes; an older amdgpu gives no name."""
    return [
        Card(
            vendor="amd",
            model=sysfs.read_text(f"{device}/product_name")
            or f"AMD {sysfs.read_text(f'{device}/device')}",
            uuid=sysfs.read_text(f"{device}/unique_id"),
            pci=sysfs.link_target(device).lower(),
            memory=sysfs.read_number(f"{device}/mem_info_vram_total"),
            used=sysfs.read_number(f"{device}/mem_info_vram_used"),
        )
        for device in card_directories(root)
    ]


class AmdSampling:
    """Samples the cards from the files of amdgpu."""

    # The files contain no error messages.
    problem = ""

    def __init__(self, root: str = "") -> None:
        self.root = root
        self.devices = card_directories(root)
        found = read_cards(root)
        self.places = [card.pci for card in found]
        self.models = [card.model for card in found]

    def sample(self) -> dict[str, list[Number]]:
        each = [self.card(device) for device in self.devices]
        return {name: [card[name] for card in each] for name in (each[0] if each else ())}

    def card(self, device: str) -> dict[str, Number]:
        busy = sysfs.read_number(f"{device}/gpu_busy_percent")
        # The driver chooses the name of the directory, such as hwmon3.
        monitors = sysfs.list_names(f"{device}/hwmon")
        monitor = f"{device}/hwmon/{monitors[0]}" if monitors else ""
        watts = sysfs.read_number(f"{monitor}/power1_average")
        watts = sysfs.read_number(f"{monitor}/power1_input") if watts is None else watts
        return {
            "use": None if busy is None else busy / 100,
            "memory_bytes": sysfs.read_number(f"{device}/mem_info_vram_used"),
            "memory_total_bytes": sysfs.read_number(f"{device}/mem_info_vram_total"),
            "celsius": scale_number(sysfs.read_number(f"{monitor}/temp1_input"), 1e-3),
            "watts": scale_number(watts, 1e-6),
            "watts_most": scale_number(sysfs.read_number(f"{monitor}/power1_cap"), 1e-6),
            "mhz": parse_clock(sysfs.read_text(f"{device}/pp_dpm_sclk")),
            "memory_mhz": parse_clock(sysfs.read_text(f"{device}/pp_dpm_mclk")),
            "ecc_uncorrected": ecc_errors(sysfs.link_target(device), self.root),
        }


def scale_number(number: int | None, unit: float) -> Number:
    return None if number is None else round(number * unit, 1)


def parse_clock(text: str) -> Number:
    """Return the clock of the line with a star: `1: 2100Mhz *`."""
    match = re.search(r"(\d{1,6})M[Hh]z *\*", text)
    return int(match[1]) if match else None
