"""Reads the state of NVIDIA GPUs from the driver's files, nvidia-smi and the kernel's log.

A missing value is None. nvidia-smi writes [N/A], [Not Supported], [Unknown Error],
[GPU requires reset], ERR! or similar in its place. A GPU that is lost is one line of text
among the others.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.node.machine import sysfs
from orchestrator.node.machine.amd import Number
from orchestrator.protocol.facts import XID, Card, Gpu, Holder, Xid

if TYPE_CHECKING:
    from orchestrator.node.machine.tool import Output

GPU_FIELDS = (
    *("index", "uuid", "name", "pci.bus_id", "memory.total", "memory.used", "utilization.gpu"),
    *("temperature.gpu", "driver_version", "ecc.errors.uncorrected.volatile.total"),
    *("retired_pages.pending", "remapped_rows.pending", "remapped_rows.failure"),
    *("pcie.link.width.current", "pcie.link.width.max"),
)
# The name comes last: it may hold commas.
APP_FIELDS = ("pid", "gpu_uuid", "used_memory", "process_name")
# Name in a sample -> nvidia-smi's field, and the value of one of its units.
SAMPLED = {
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
SAMPLE_FIELDS = ["index", "name", "pci.bus_id", *(field for field, _ in SAMPLED.values())]
UNKNOWN_FIELD = re.compile(r'Field "([a-z_.]+)" is not a valid field')
# Without persistence mode the driver is loaded for every query.
QUERY_SECONDS = 20.0
MOST_GPUS = 64
# After a failure, a sampler runs nvidia-smi again only after this time.
AGAIN_SECONDS = 300.0

Row = dict[str, str]


def query_smi(what: str, fields: Sequence[str], seconds: float) -> tuple[list[Row], Output]:
    """Run a query of nvidia-smi; return its rows and its whole output.

    A query is refused for its first field that an older driver does not know: that one is dropped.
    """
    # The probe does not need this import.
    from orchestrator.node.machine import tool

    known = list(fields)
    while True:
        query = [f"--query-{what}={','.join(known)}", "--format=csv,noheader,nounits"]
        output = tool.run_tool(["nvidia-smi", *query], seconds)
        refused = UNKNOWN_FIELD.search(output.out + output.problem)
        if refused is None or refused[1] not in known:
            return parse_rows(output.out, known), output
        known.remove(refused[1])


def parse_rows(text: str, fields: Sequence[str]) -> list[Row]:
    """Return the lines that have all the fields; any other line is a message, not a GPU."""
    complete = []
    for line in text.splitlines():
        values = [word.strip() for word in line.split(",", len(fields) - 1)]
        if len(values) == len(fields):
            complete.append(dict(zip(fields, values)))
    return complete


def parse_value(word: str) -> str:
    """Return a value, or an empty string if nvidia-smi reports none."""
    empty = word.startswith("[") or word in ("", "N/A", "ERR!", "Unknown Error", "Not Supported")
    return "" if empty else word


def parse_number(word: str) -> int | None:
    match = re.match(r"-?\d+", parse_value(word))
    return int(match.group()) if match else None


def parse_flag(word: str) -> bool | None:
    """Return 0 and 1, or No and Yes, as a bool; None for anything else."""
    return {"yes": True, "1": True, "no": False, "0": False}.get(parse_value(word).lower())


def gpus_of_rows(found: Sequence[Row]) -> list[Gpu]:
    """Return the GPUs; `problem` is the error shown in place of values."""
    return [
        Gpu(
            vendor="nvidia",
            index=parse_number(row["index"]),
            uuid=parse_value(row["uuid"]),
            model=parse_value(row["name"]),
            pci=short_pci(parse_value(row["pci.bus_id"])),
            memory=parse_mebibytes(row["memory.total"]),
            used=parse_mebibytes(row["memory.used"]),
            busy=parse_number(row["utilization.gpu"]),
            temperature=parse_number(row["temperature.gpu"]),
            driver=parse_value(row["driver_version"]),
            ecc_errors=parse_number(row["ecc.errors.uncorrected.volatile.total"]),
            pages_pending=parse_flag(row.get("retired_pages.pending", "")),
            rows_pending=parse_flag(row.get("remapped_rows.pending", "")),
            rows_failed=parse_flag(row.get("remapped_rows.failure", "")),
            pcie_width=parse_number(row.get("pcie.link.width.current", "")),
            pcie_width_most=parse_number(row.get("pcie.link.width.max", "")),
            problem=gpu_sickness(row),
        )
        for row in found
        if parse_number(row["index"]) is not None
    ]


def parse_mebibytes(word: str) -> int | None:
    """Return a number of MiB in bytes."""
    many = parse_number(word)
    return None if many is None else many << 20


def gpu_sickness(row: Row) -> str:
    """Return the error of a GPU, such as ERR!; [N/A] only means that the model has no value."""
    for field, word in row.items():
        bare = word.strip("[]")
        if re.search(r"requires reset|is lost|Unknown Error|ERR!|fallen off", bare):
            return f"nvidia-smi says {bare!r} for its {field}"
    return ""


def lost_gpus(text: str) -> list[str]:
    """Return messages in place of GPUs: `Unable to determine the device handle for GPU...`."""
    return [
        line.strip()
        for line in text.splitlines()
        if re.search(r"Unable to determine the device handle|is lost|fallen off", line)
    ]


def processes_of_rows(found: Sequence[Row]) -> list[Holder]:
    """Return the processes on GPUs; with MIG without memory, in containers without names."""
    return [
        Holder(
            pid=pid,
            gpu=parse_value(row["gpu_uuid"]),
            used=parse_mebibytes(row["used_memory"]),
            name=parse_value(row["process_name"]),
        )
        for row in found
        if (pid := parse_number(row["pid"])) is not None
    ]


def computing_processes(seconds: float) -> tuple[list[Holder], str]:
    """Return the processes that compute on GPUs, and the reason if they are unknown."""
    found, output = query_smi("compute-apps", APP_FIELDS, seconds)
    return processes_of_rows(found), output.problem


def find_xids(text: str) -> list[Xid]:
    """Return the errors that the driver reported, the last of each number on each GPU."""
    errors: dict[tuple[str, int], Xid] = {}
    for match in map(XID.match, text.splitlines()):
        if match:
            key = pci, xid = short_pci(match.group(1)), int(match.group(2)[:9])
            before = errors.pop(key, None)
            count, words = before.count if before else 0, match.group(3).strip()[:200]
            errors[key] = Xid(pci=pci, xid=xid, words=words, count=count + 1)
    return list(errors.values())


def short_pci(text: str) -> str:
    """Return 0000:4f:00 for each of 00000000:4F:00.0, 0000:4f:00.0 and 0000:4f:00."""
    match = re.match(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})", text.lower())
    if not match:
        return text.lower()
    return f"{(match.group(1) or '0000')[-4:]}:{match.group(2)}:{match.group(3)}"


def read_cards(root: str = "", *, seen: bool = False) -> list[Card]:
    """Return the cards from the files of the driver, which do not contain the memory.

    With `seen`, only those that this login may open: a container has a device file for its own.
    """
    top = f"{root}/proc/driver/nvidia/gpus"
    found = []
    for pci in sysfs.list_names(top):
        information = parse_fields(sysfs.read_text(f"{top}/{pci}/information"))
        model, uuid = information.get("Model", ""), information.get("GPU UUID", "")
        minor = information.get("Device Minor", "")
        if seen and minor and not os.path.exists(f"{root}/dev/nvidia{minor}"):
            continue
        uuid = "" if "?" in uuid else uuid
        found.append(Card(vendor="nvidia", model=model, uuid=uuid, pci=pci.lower()))
    return found


def parse_fields(text: str) -> dict[str, str]:
    """Return `Model: \\t\\t NVIDIA H100` lines as {"Model": "NVIDIA H100"}."""
    values = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            values[key.strip()] = value.strip()
    return values


class NvidiaSampling:
    """Samples the GPUs by nvidia-smi; `problem` is the reason if there are no values.

    One call takes 0.1 s of a core on a machine with 8 GPUs whose driver is loaded, as it is while
    a job runs. A GPU keeps the place of its index while another one is lost.
    """

    def __init__(self, root: str = "") -> None:
        self.count = len(read_cards(root))
        self.fields = SAMPLE_FIELDS
        self.models: list[str] = []
        # The addresses on the PCI bus.
        self.places: list[str] = []
        # The time before which nvidia-smi is not run again.
        self.again = 0.0
        self.problem = ""

    def sample(self) -> dict[str, list[Number]]:
        """Return a list of values, one for each GPU, by name; empty if none are known."""
        if time.monotonic() < self.again:
            return {}
        answer, output = query_smi("gpu", self.fields, QUERY_SECONDS)
        self.fields = list(answer[0]) if answer else self.fields
        self.problem = output.problem
        if self.problem:
            self.again = time.monotonic() + AGAIN_SECONDS
        found = {index: row for row in answer if (index := parse_number(row["index"])) is not None}
        found = {index: row for index, row in found.items() if 0 <= index < MOST_GPUS}
        if not found:
            return {}
        self.count = max(self.count, *(index + 1 for index in found))
        every = [found.get(index, {}) for index in range(self.count)]
        more = [""] * (self.count - len(self.models))
        self.models, self.places = [*self.models, *more], [*self.places, *more]
        for index, row in found.items():
            self.models[index], self.places[index] = row["name"], short_pci(row["pci.bus_id"])
        known = {name: way for name, way in SAMPLED.items() if way[0] in self.fields}
        return {
            name: [scaled_number(row.get(field, ""), unit) for row in every]
            for name, (field, unit) in known.items()
        }


def scaled_number(word: str, unit: float) -> Number:
    """Return a number or a bit mask (0x...), multiplied by `unit`; None if there is none."""
    word = parse_value(word)
    try:
        found = int(word, 16) if word.startswith("0x") else float(word)
    except ValueError:
        return None
    rounded = round(found * unit, 2)
    return int(rounded) if rounded == int(rounded) else rounded
