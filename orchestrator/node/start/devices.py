"""Chooses which GPUs of this machine a launch gets: free ones that are near each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.node.machine import amd, nvidia
from orchestrator.protocol.facts import Card
from orchestrator.protocol.requests.claims import SLOT, VISIBLE

OF_VENDOR = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES"}


class Device(NamedTuple):
    """One GPU, or one slot of a machine without: it can be claimed."""

    key: str  # its name in the machine's book
    name: str  # for people: GPU 3
    value: str = ""  # its name in the variable that hides the others from a process
    vendor: str = ""
    uuid: str = ""


def gpus(root: str = "") -> list[Device]:
    """Return the GPUs that a login sees here, in the order of the bus."""
    found: Sequence[Card] = nvidia.cards(root, seen=True) or amd.cards(root)
    return [
        Device(
            key=f"gpu-{card.pci or index}",
            name=f"GPU {index}",
            value=card.uuid if card.vendor == "nvidia" and card.uuid else str(index),
            vendor=card.vendor,
            uuid=card.uuid,
        )
        for index, card in enumerate(found)
    ]


def slots(count: int) -> list[Device]:
    return [Device(key=f"{SLOT}{index}", name=f"slot {index}") for index in range(count)]


def visible(devices: Sequence[Device], named: str) -> list[Device]:
    """Return those that a value of CUDA_VISIBLE_DEVICES names; as in CUDA, up to the first error.

    What names a part of a GPU (MIG) is claimed by that name.
    """
    chosen: list[Device] = []
    for word in filter(None, (part.strip() for part in named.split(","))):
        if word.startswith("MIG-"):
            chosen.append(Device(f"mig-{word}", word, word, "nvidia"))
            continue
        if word.isdigit():
            fits = devices[int(word) : int(word) + 1]
        else:
            fits = [one for one in devices if one.uuid.lower().startswith(word.lower())]
        if len(fits) != 1 or fits[0] in chosen:
            break
        chosen.append(fits[0])
    return chosen


def nearest(free: Sequence[Device], count: int) -> Sequence[Device]:
    """Choose so many that are near each other on the bus; of equal choices the first."""
    rows = [free[start : start + count] for start in range(len(free) - count + 1)]
    return min(rows, key=lambda row: number(row[-1]) - number(row[0])) if count else []


def number(device: Device) -> int:
    word = device.name.rpartition(" ")[2]
    return int(word) if word.isdigit() else 0


def environment(chosen: Sequence[Device], of: Sequence[Device]) -> dict[str, str]:
    """Return what hides the other GPUs from a process; nothing where it has all."""
    vendors = {device.vendor for device in chosen} - {""}
    if not vendors or {device.key for device in chosen} == {device.key for device in of}:
        return {}
    values = ",".join(device.value for device in chosen)
    names = {OF_VENDOR[vendor]: values for vendor in vendors}
    by_number = "nvidia" in vendors and all(device.value.isdigit() for device in chosen)
    return {**names, **({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if by_number else {})}


def asked_for(named: str) -> str:
    """Return the GPUs that the user's own settings name: those of the launch, else the login's."""
    return named or next(filter(None, (os.environ.get(name) for name in VISIBLE)), "")
