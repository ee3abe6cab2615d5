"""Chooses which GPUs of this machine a launch gets: free ones that are near each other."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from orchestrator.node.machine import sysfs
from orchestrator.node.machine.gpus import amd, nvidia
from orchestrator.protocol.facts import Card
from orchestrator.protocol.requests.claims import SLOT, VISIBLE

MOST_CHOICES = 16  # GPUs of which all ways to choose are compared
NOWHERE = -1  # the NUMA node of what is known of none
OF_VENDOR = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES"}


class Device(NamedTuple):
    """One GPU, or one slot of a machine without: it can be claimed."""

    key: str  # its name in the machine's book
    name: str  # for people: GPU 3
    value: str = ""  # its name in the variable that hides the others from a process
    vendor: str = ""
    uuid: str = ""
    group: int = 0  # the NUMA node that it is at


def gpus(root: str = "") -> list[Device]:
    """Return the GPUs that a login sees here, in the order of the bus."""
    found: Sequence[Card] = nvidia.cards_seen(root) or amd.cards(root)
    return [
        Device(
            key=f"gpu-{card.pci or index}",
            name=f"GPU {index}",
            value=card.uuid if card.vendor == "nvidia" and card.uuid else str(index),
            vendor=card.vendor,
            uuid=card.uuid,
            group=numa(card.pci, root),
        )
        for index, card in enumerate(found)
    ]


def numa(pci: str, root: str) -> int:
    """Return the number of the NUMA node that a card is connected to; -1 where nobody knows."""
    node = sysfs.number(f"{root}/sys/bus/pci/devices/{pci}/numa_node")
    return NOWHERE if node is None else node


def cpus_of_ranks(ranks: int, environ: Mapping[str, str], root: str = "") -> tuple[str, ...]:
    """Return for each rank the CPUs of its GPU's NUMA node; nothing where that says nothing.

    That is a machine with one node, or ranks of which each has not one GPU.
    """
    everything = gpus(root)
    named = next(filter(None, (environ.get(name) for name in VISIBLE)), "")
    seen = visible(everything, named) if named else everything
    nodes = {device.group for device in seen}
    if len(seen) != ranks or NOWHERE in nodes:
        return ()
    place = f"{root}/sys/devices/system/node"
    if sum(name[4:].isdigit() for name in sysfs.names(place) if name.startswith("node")) < 2:
        return ()
    cpus = {node: sysfs.text(f"{place}/node{node}/cpulist").strip() for node in nodes}
    return tuple(cpus[device.group] for device in seen) if all(cpus.values()) else ()


def slots(count: int) -> list[Device]:
    return [Device(key=f"{SLOT}{index}", name=f"slot {index}") for index in range(count)]


def visible(devices: Sequence[Device], named: str) -> list[Device]:
    """Return those that a value of CUDA_VISIBLE_DEVICES names; as in CUDA, up to the first error.

    What names a part of a GPU (MIG) is claimed by that name.
    """
    chosen: list[Device] = []
    for word in filter(None, (part.strip() for part in named.split(","))):
        if word.startswith("MIG-"):
            chosen.append(Device(f"mig-{word}", word, word, "nvidia", group=NOWHERE))
            continue
        if word.isdigit():
            fits = devices[int(word) : int(word) + 1]
        else:
            fits = [one for one in devices if one.uuid.lower().startswith(word.lower())]
        if len(fits) != 1 or fits[0] in chosen:
            break
        chosen.append(fits[0])
    return chosen


def nearest(
    free: Sequence[Device], count: int, links: Mapping[tuple[int, int], int] | None = None
) -> list[Device]:
    """Choose so many that are near each other, and leave large groups to those who need them.

    First count the NVLinks between them (by their numbers), then how few lead to others that are
    free, then how few NUMA nodes they are at, and how few are free there. Among equals it is
    neighbours on the bus, and pairs that may have a bridge.
    """
    every = sorted(map(number, free))
    links = links or {}
    between = {pair: links.get(pair, 0) for pair in itertools.product(every, every)}
    at_node = Counter(device.group for device in free)

    def cost(chosen: Iterable[Device]) -> tuple[int, ...]:
        numbers = [number(device) for device in chosen]
        linked = sum(between[pair] for pair in itertools.combinations(numbers, 2))
        cut = sum(between[pair] for pair in itertools.product(numbers, every)) - 2 * linked
        nodes = {device.group for device in chosen}
        others = sum(at_node[node] for node in nodes)
        return -linked, cut, len(nodes), others, numbers[-1] - numbers[0], numbers[0] % count

    if not count:
        return []
    return list(min(choices(free, count), key=cost, default=()))


def choices(free: Sequence[Device], count: int) -> Iterator[Sequence[Device]]:
    """Yield all ways to choose so many GPUs; of slots, and of very many, those in a row alone."""
    if len(free) <= MOST_CHOICES and any(device.vendor for device in free):
        yield from itertools.combinations(free, count)
        return
    for start in range(len(free) - count + 1):
        yield free[start : start + count]


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
