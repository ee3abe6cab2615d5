"""Samples what the GPUs do, every few seconds: by nvidia-smi, and by the files of amdgpu.

One nvidia-smi takes 0.1 s of a core on a machine with 8 GPUs whose driver is loaded, as it is
while a job runs.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.node.machine import tool
from orchestrator.node.machine.gpus import amd, nvidia
from orchestrator.node.machine.tool import Command

# Name in a sample -> nvidia-smi's field, and what one of its units is.
NVIDIA = {
    "use": ("utilization.gpu", 0.01),
    "memory_bytes": ("memory.used", 1 << 20),
    "memory_total_bytes": ("memory.total", 1 << 20),
    "celsius": ("temperature.gpu", 1),
    "watts": ("power.draw", 1),
    "watts_most": ("enforced.power.limit", 1),
    "mhz": ("clocks.sm", 1),
    "memory_mhz": ("clocks.mem", 1),
    "throttle": ("clocks_event_reasons.active", 1),
    "ecc_uncorrected": ("ecc.errors.uncorrected.volatile.total", 1),
    "ecc_corrected": ("ecc.errors.corrected.volatile.total", 1),
}
FIRST = ("index", "name", "pci.bus_id")
UNKNOWN_FIELD = re.compile(r'Field "([a-z_.]+)" is not a valid field')
QUERY_SECONDS = 20.0
MOST_GPUS = 64
AGAIN_SECONDS = 300.0  # after a failure, until nvidia-smi is asked again

Columns = dict[str, list[amd.Number]]


class Nvidia:
    """The GPUs of NVIDIA; `problem` says why there are no values.

    Each GPU has the place of its index, also while another one says nothing, as it is lost.
    """

    def __init__(self, root: str = "") -> None:
        self.count = len(nvidia.cards(root))
        self.fields = {name: field for name, (field, _) in NVIDIA.items()}
        self.models: list[str] = []
        self.places: list[str] = []  # on the PCI bus
        self.again = 0.0 if shutil.which("nvidia-smi") else float("inf")  # when it is asked
        self.problem = ""

    def sample(self) -> Columns:
        """Return the values of all GPUs; empty if none are known."""
        if time.monotonic() < self.again:
            return {}
        query = nvidia.query("gpu", (*FIRST, *self.fields.values()))
        output = tool.run(Command(query, QUERY_SECONDS))
        if match := UNKNOWN_FIELD.search(output.out + output.problem):  # of an older driver
            self.fields = {name: own for name, own in self.fields.items() if own != match[1]}
            return {}
        self.problem = output.problem
        if self.problem:
            self.again = time.monotonic() + AGAIN_SECONDS
        rows: dict[int, list[str]] = {}
        for row in nvidia.rows(output.out, (*FIRST, *self.fields)):
            index = nvidia.number(row["index"])
            if index is not None and 0 <= index < MOST_GPUS:
                rows[index] = list(row.values())
        self.count = max([self.count, *(index + 1 for index in rows)])
        return self.columns(rows)

    def columns(self, rows: Mapping[int, Sequence[str]]) -> Columns:
        if not rows:
            return {}
        more = [""] * (self.count - len(self.models))
        self.models, self.places = [*self.models, *more], [*self.places, *more]
        for index, row in rows.items():
            self.models[index], self.places[index] = row[1], nvidia.short_pci(row[2])
        return {
            name: [
                value(rows[index][len(FIRST) + at], NVIDIA[name][1]) if index in rows else None
                for index in range(self.count)
            ]
            for at, name in enumerate(self.fields)
        }


def value(word: str, unit: float) -> amd.Number:
    """Return a number, or a mask of bits (0x...), in our unit; None where there is none."""
    word = nvidia.value(word)
    try:
        number = int(word, 16) if word.startswith("0x") else float(word)
    except ValueError:
        return None
    scaled = round(number * unit, 2)
    return int(scaled) if scaled == int(scaled) else scaled


class Gpus:
    """All GPUs of this machine, those of NVIDIA first, each always at the same place."""

    def __init__(self, root: str = "") -> None:
        self.nvidia, self.amd = Nvidia(root), amd.Sampling(root)

    def sample(self) -> dict[str, Any]:
        """Return name -> a value for each GPU; empty where there is none, or nothing new."""
        first, second = self.nvidia.sample(), self.amd.sample()
        return {
            name: [
                *first.get(name, [None] * self.nvidia.count),
                *second.get(name, [None] * len(self.amd.devices)),
            ]
            for name in {**first, **second}
        }

    @property
    def models(self) -> list[str]:
        return [*self.of_nvidia(self.nvidia.models), *self.amd.models]

    @property
    def places(self) -> list[str]:
        """Return where each is on the PCI bus, as the facts have it; empty: not known yet."""
        return [*self.of_nvidia(self.nvidia.places), *self.amd.places]

    def of_nvidia(self, known: Sequence[str]) -> list[str]:
        return [*known, *[""] * (self.nvidia.count - len(known))]
