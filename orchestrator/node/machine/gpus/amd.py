"""Reads what amdgpu's files and rocm-smi tell of AMD GPUs. A missing value is None."""

from __future__ import annotations

import json
import re
from typing import Any, Union

from orchestrator.node.machine import sysfs
from orchestrator.protocol.facts import Card, Gpu, Holder

VENDOR = "0x1002"
PROCESSES = "/sys/class/kfd/kfd/proc"

ROCM_SMI = [
    *("rocm-smi", "--showproductname", "--showuniqueid", "--showbus", "--showmeminfo", "vram"),
    *("--showuse", "--showdriverversion", "--showpids", "--json"),
]
NAMES = ("card series", "card model", "device name", "card sku", "gfx version")

Number = Union[int, float, None]  # noqa: UP007  Python 3.9


def gpus(text: str) -> list[Gpu]:
    """Read rocm-smi's JSON, whose keys change their letters' case between versions."""
    cards: dict[int, Gpu] = {}
    for key, values in document(text).items():
        match = re.fullmatch(r"card(\d{1,6})", str(key))
        if not match or not isinstance(values, dict):
            continue
        fields = {str(name).lower(): text_of(value) for name, value in values.items()}
        names = [fields[name] for name in NAMES if fields.get(name)]
        cards[int(match.group(1))] = Gpu(
            vendor="amd",
            index=int(match.group(1)),
            uuid=fields.get("unique id", ""),
            model=next((name for name in names if not name.startswith("0x")), ""),
            pci=fields.get("pci bus", "").lower(),
            memory=number(fields.get("vram total memory (b)", "")),
            used=number(fields.get("vram total used memory (b)", "")),
            busy=number(fields.get("gpu use (%)", "")),
        )
    return [cards[index] for index in sorted(cards)]


def driver(text: str) -> str:
    system = document(text).get("system")
    values = system.items() if isinstance(system, dict) else ()
    return next((text_of(v) for k, v in values if str(k).lower() == "driver version"), "")


def processes(text: str) -> list[Holder]:
    """Read `"PID4711": "python3, 1, 18165104640, 0, unknown"`: name, GPUs, bytes, ..."""
    system = document(text).get("system")
    holders = []
    for key, value in system.items() if isinstance(system, dict) else ():
        match = re.fullmatch(r"PID(\d{1,10})", str(key))
        if not match:
            continue
        parts = [part.strip() for part in text_of(value).rsplit(",", 4)]
        used = number(parts[2]) if len(parts) == 5 else None
        if len(parts) == 5 and parts[1] == "0" and not used:
            continue  # it has the driver open, and uses no GPU: a monitor, or rocm-smi itself
        holders.append(Holder(pid=int(match.group(1)), gpu="", used=used, name=parts[0]))
    return holders


def ecc_errors(pci: str, root: str = "") -> int | None:
    """Sum the uncorrected errors of all blocks (`ue: 0`); None where the card counts none."""
    top = f"{root}/sys/bus/pci/devices/{pci}/ras"
    counts = [
        int(match.group(1))
        for name in sysfs.names(top)
        for match in [re.search(r"^ue: (\d{1,15})", sysfs.text(f"{top}/{name}"), re.MULTILINE)]
        if name.endswith("_err_count") and match
    ]
    return sum(counts) if counts else None


def document(text: str) -> dict[str, Any]:
    """Return the JSON after the warnings that precede it on standard output."""
    try:
        value = json.loads(text[text.index("{") :])
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def text_of(value: Any) -> str:
    text = str(value).strip()
    return "" if text.upper() in ("N/A", "NONE", "UNKNOWN") else text


def number(text: str) -> int | None:
    match = re.match(r"\d{1,18}", text)
    return int(match.group()) if match else None


# -- from files ------------------------------------------------------------------------------


def count(root: str = "") -> int:
    """Count the GPUs: KFD lists CPUs as nodes too, but only GPUs have SIMD units."""
    nodes = f"{root}/sys/class/kfd/kfd/topology/nodes"
    count = 0
    for node in sysfs.names(nodes):
        match = re.search(
            r"^simd_count (\d+)", sysfs.text(f"{nodes}/{node}/properties"), re.MULTILINE
        )
        count += bool(match and int(match.group(1)))
    return count


def devices(root: str = "") -> list[str]:
    """Return the directories of the cards that amdgpu drives, in the order of their numbers."""
    top = f"{root}/sys/class/drm"
    names = [name for name in sysfs.names(top) if re.fullmatch(r"card\d+", name)]
    paths = [f"{top}/{name}/device" for name in sorted(names, key=lambda name: int(name[4:]))]
    return [path for path in paths if is_driven(path)]


def is_driven(device: str) -> bool:
    """Tell amdgpu's cards from others, and from those that no driver has."""
    memory = sysfs.number(f"{device}/mem_info_vram_total")
    return memory is not None and sysfs.text(f"{device}/vendor") == VENDOR


def cards(root: str = "") -> list[Card]:
    """Read the cards from sysfs, memory in bytes; an older amdgpu tells no name."""
    return [
        Card(
            vendor="amd",
            model=sysfs.text(f"{device}/product_name") or f"AMD {sysfs.text(f'{device}/device')}",
            uuid=sysfs.text(f"{device}/unique_id"),
            pci=sysfs.target(device).lower(),
            memory=sysfs.number(f"{device}/mem_info_vram_total"),
            used=sysfs.number(f"{device}/mem_info_vram_used"),
        )
        for device in devices(root)
    ]


def memory_of_processes(root: str = "") -> dict[int, int]:
    """Return PID -> bytes on all cards, of processes that have any: KFD has a directory of each."""
    held = {}
    for pid in filter(str.isdigit, sysfs.names(f"{root}{PROCESSES}")):
        top = f"{root}{PROCESSES}/{pid}"
        files = [name for name in sysfs.names(top) if name.startswith("vram_")]
        held[int(pid)] = sum(sysfs.number(f"{top}/{name}") or 0 for name in files)
    return {pid: size for pid, size in held.items() if size}


class Sampling:
    """Reads what the cards do now from the files of amdgpu."""

    def __init__(self, root: str = "") -> None:
        self.root = root
        self.devices = devices(root)
        found = cards(root)
        self.places = [card.pci for card in found]
        self.models = [card.model for card in found]

    def sample(self) -> dict[str, list[Number]]:
        each = [self.card(device) for device in self.devices]
        return {name: [card[name] for card in each] for name in (each[0] if each else ())}

    def card(self, device: str) -> dict[str, Number]:
        busy = sysfs.number(f"{device}/gpu_busy_percent")
        # Small steps: a directory of names that the driver chose, hwmon3.
        monitors = sysfs.names(f"{device}/hwmon")
        monitor = f"{device}/hwmon/{monitors[0]}" if monitors else ""
        watts = sysfs.number(f"{monitor}/power1_average")
        watts = sysfs.number(f"{monitor}/power1_input") if watts is None else watts
        return {
            "use": None if busy is None else busy / 100,
            "memory_bytes": sysfs.number(f"{device}/mem_info_vram_used"),
            "memory_total_bytes": sysfs.number(f"{device}/mem_info_vram_total"),
            "celsius": scaled(sysfs.number(f"{monitor}/temp1_input"), 1e-3),
            "watts": scaled(watts, 1e-6),
            "watts_most": scaled(sysfs.number(f"{monitor}/power1_cap"), 1e-6),
            "mhz": clock(sysfs.text(f"{device}/pp_dpm_sclk")),
            "memory_mhz": clock(sysfs.text(f"{device}/pp_dpm_mclk")),
            "ecc_uncorrected": ecc_errors(sysfs.target(device), self.root),
        }


def scaled(number: int | None, unit: float) -> Number:
    return None if number is None else round(number * unit, 1)


def clock(text: str) -> Number:
    """Read the line with a star: `1: 2100Mhz *`."""
    match = re.search(r"(\d{1,6})M[Hh]z *\*", text)
    return int(match[1]) if match else None
