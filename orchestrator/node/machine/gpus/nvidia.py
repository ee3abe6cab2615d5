"""Reads what the driver's files, nvidia-smi and the kernel's log tell of NVIDIA GPUs.

A value that is missing is None. nvidia-smi writes [N/A], [Not Supported], [Unknown Error],
[GPU requires reset], ERR! or similar where it has none, and a GPU that is lost is one line of text
among the others.
"""

from __future__ import annotations

import os
import re
from typing import Any

from orchestrator.node.machine import sysfs
from orchestrator.protocol.facts import XID, Card, Gpu, Holder, Xid

GPU_FIELDS = (
    *("index", "uuid", "name", "pci.bus_id", "memory.total", "memory.used", "utilization.gpu"),
    *("temperature.gpu", "driver_version", "compute_mode", "mig.mode.current", "ecc.mode.current"),
    "ecc.errors.uncorrected.volatile.total",
)
# Older drivers do not know all of these, and refuse a query for its first unknown field.
MORE_FIELDS = (
    *("uuid", "ecc.errors.uncorrected.aggregate.total", "retired_pages.pending"),
    *("remapped_rows.pending", "remapped_rows.failure"),
    *("pcie.link.width.current", "pcie.link.width.max"),
)
APP_FIELDS = ("pid", "gpu_uuid", "used_memory", "process_name")  # the name last: it may hold commas


def query(what: str, fields: tuple[str, ...]) -> list[str]:
    return ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]


def rows(text: str, fields: tuple[str, ...]) -> list[dict[str, str]]:
    """Return the lines that have all the fields; any other line is a message, not a GPU."""
    complete = []
    for line in text.splitlines():
        values = [word.strip() for word in line.split(",", len(fields) - 1)]
        if len(values) == len(fields):
            complete.append({field: values[i] for i, field in enumerate(fields)})
    return complete


def value(word: str) -> str:
    """Return a value, or nothing where nvidia-smi writes that there is none."""
    empty = word.startswith("[") or word in ("", "N/A", "ERR!", "Unknown Error", "Not Supported")
    return "" if empty else word


def number(word: str) -> int | None:
    match = re.match(r"-?\d+", value(word))
    return int(match.group()) if match else None


def flag(word: str) -> bool | None:
    lower = value(word).lower()
    return {"enabled": True, "yes": True, "disabled": False, "no": False}.get(lower)


def gpus(text: str) -> list[Gpu]:
    """Return the GPUs; `problem` is the error shown in place of values."""
    return [
        Gpu(
            vendor="nvidia",
            index=number(row["index"]),
            uuid=value(row["uuid"]),
            model=value(row["name"]),
            pci=short_pci(value(row["pci.bus_id"])),
            memory=mebibytes(row["memory.total"]),
            used=mebibytes(row["memory.used"]),
            busy=number(row["utilization.gpu"]),
            temperature=number(row["temperature.gpu"]),
            driver=value(row["driver_version"]),
            compute_mode=value(row["compute_mode"]),
            mig=flag(row["mig.mode.current"]),
            ecc=flag(row["ecc.mode.current"]),
            ecc_errors=number(row["ecc.errors.uncorrected.volatile.total"]),
            problem=sickness(row),
        )
        for row in rows(text, GPU_FIELDS)
        if number(row["index"]) is not None
    ]


def mebibytes(word: str) -> int | None:
    """Return the bytes that a number of MiB stands for."""
    many = number(word)
    return None if many is None else many << 20


def sickness(row: dict[str, str]) -> str:
    """Say what is wrong with a GPU: ERR! is; [N/A] is a question that this model cannot answer."""
    for field, word in row.items():
        bare = word.strip("[]")
        if re.search(r"requires reset|is lost|Unknown Error|ERR!|fallen off", bare):
            return f"nvidia-smi says {bare!r} for its {field}"
    return ""


def lost(text: str) -> list[str]:
    """Return messages in place of GPUs: `Unable to determine the device handle for GPU...`."""
    return [
        line.strip()
        for line in text.splitlines()
        if re.search(r"Unable to determine the device handle|is lost|fallen off", line)
    ]


def more(text: str) -> dict[str, dict[str, Any]]:
    """Return uuid -> what newer drivers add: memory that fails, PCIe links narrower than built."""
    return {
        row["uuid"]: {
            "pages_pending": flag(row["retired_pages.pending"]),
            "rows_pending": state(row["remapped_rows.pending"]),
            "rows_failed": state(row["remapped_rows.failure"]),
            "pcie_width": number(row["pcie.link.width.current"]),
            "pcie_width_most": number(row["pcie.link.width.max"]),
        }
        for row in rows(text, MORE_FIELDS)
    }


def state(word: str) -> bool | None:
    """Read 0 and 1, or No and Yes, as drivers say."""
    value = number(word)
    return flag(word) if value is None else bool(value)


def processes(text: str) -> list[Holder]:
    """Return who computes on which GPU; with MIG without memory, in containers without names."""
    return [
        Holder(
            pid=pid,
            gpu=value(row["gpu_uuid"]),
            used=mebibytes(row["used_memory"]),
            name=value(row["process_name"]),
        )
        for row in rows(text, APP_FIELDS)
        if (pid := number(row["pid"])) is not None
    ]


def computing(seconds: float) -> tuple[list[Holder], str]:
    """Ask nvidia-smi who computes on which GPU; return why that is not known as well."""
    from orchestrator.node.machine import tool  # not for the probe

    output = tool.run(tool.Command(query("compute-apps", APP_FIELDS), seconds))
    return processes(output.out), output.problem


def xids(text: str) -> list[Xid]:
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
    """00000000:4F:00.0, 0000:4f:00.0 and 0000:4f:00 are one place: 0000:4f:00."""
    match = re.match(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})", text.lower())
    if not match:
        return text.lower()
    return f"{(match.group(1) or '0000')[-4:]}:{match.group(2)}:{match.group(3)}"


def cards(root: str = "") -> list[Card]:
    """Read the cards from the files of the driver, which tell no memory."""
    top = f"{root}/proc/driver/nvidia/gpus"
    found_cards = []
    for pci in sysfs.names(top):
        information = fields(sysfs.text(f"{top}/{pci}/information"))
        model, uuid = information.get("Model", ""), information.get("GPU UUID", "")
        found_cards.append(
            Card(
                vendor="nvidia",
                model=model,
                uuid="" if "?" in uuid else uuid,
                pci=pci.lower(),
                memory=None,
                used=None,
            )
        )
    return found_cards


def cards_seen(root: str = "") -> list[Card]:
    """Return the cards that this login may open: a container has a device file for its own."""
    found = cards(root)
    top = f"{root}/proc/driver/nvidia/gpus"
    minors = {
        pci.lower(): fields(sysfs.text(f"{top}/{pci}/information")).get("Device Minor", "")
        for pci in sysfs.names(top)
    }
    return [
        card
        for card in found
        if not minors[card.pci] or os.path.exists(f"{root}/dev/nvidia{minors[card.pci]}")
    ]


def fields(text: str) -> dict[str, str]:
    """Turn `Model: \\t\\t NVIDIA H100` lines into {"Model": "NVIDIA H100"}."""
    values = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            values[key.strip()] = value.strip()
    return values
