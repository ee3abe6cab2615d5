"""Finds the GPUs of this machine, from files alone: how many, and what their drivers tell."""

from __future__ import annotations

import os
import re

from orchestrator.node.facts import sysfs
from orchestrator.protocol.facts import Card

AMD = "0x1002"


def gpu_count(root: str = "") -> int:
    given = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if "SLURM_STEP_ID" in os.environ and given.isdigit():
        return int(given)  # of the job's own; the others in /dev are somebody else's
    nvidia = sum(1 for name in sysfs.names(f"{root}/dev") if re.fullmatch(r"nvidia\d+", name))
    return nvidia or amd_count(root)


def amd_count(root: str = "") -> int:
    """Count the GPUs: KFD lists CPUs as nodes too, but only GPUs have SIMD units."""
    nodes = f"{root}/sys/class/kfd/kfd/topology/nodes"
    count = 0
    for node in sysfs.names(nodes):
        match = re.search(
            r"^simd_count (\d+)", sysfs.text(f"{nodes}/{node}/properties"), re.MULTILINE
        )
        count += bool(match and int(match.group(1)))
    return count


def cards(root: str = "") -> list[Card]:
    return nvidia_cards(root) + amd_cards(root)


def nvidia_cards(root: str = "") -> list[Card]:
    top = f"{root}/proc/driver/nvidia/gpus"
    found_cards = []
    for pci in sysfs.names(top):
        information = fields(sysfs.text(f"{top}/{pci}/information"))
        model, uuid = information.get("Model", ""), information.get("GPU UUID", "")
        found_cards.append(card("nvidia", model, "" if "?" in uuid else uuid, pci, None, None))
    return found_cards


def fields(text: str) -> dict[str, str]:
    """Turn `Model: \\t\\t NVIDIA H100` lines into {"Model": "NVIDIA H100"}."""
    values = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            values[key.strip()] = value.strip()
    return values


def amd_cards(root: str = "") -> list[Card]:
    """Read the cards from sysfs, memory in bytes; an older amdgpu tells no name."""
    top = f"{root}/sys/class/drm"
    found_cards = []
    for name in sysfs.names(top):
        device = f"{top}/{name}/device"
        if not re.fullmatch(r"card\d+", name) or sysfs.text(f"{device}/vendor") != AMD:
            continue
        total = sysfs.number(f"{device}/mem_info_vram_total")
        if total is None:
            continue  # bound to another driver, or to none
        model = sysfs.text(f"{device}/product_name") or f"AMD {sysfs.text(f'{device}/device')}"
        uuid = sysfs.text(f"{device}/unique_id")
        used = sysfs.number(f"{device}/mem_info_vram_used")
        found_cards.append(card("amd", model, uuid, sysfs.target(device), total, used))
    return found_cards


def card(vendor: str, model: str, uuid: str, pci: str, total: int | None, used: int | None) -> Card:
    return Card(
        vendor=vendor,
        model=model,
        uuid=uuid,
        pci=pci.lower(),
        memory=total,
        used=used,
    )
