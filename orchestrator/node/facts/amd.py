"""Parses the output of rocm-smi and amdgpu's files about AMD GPUs. A missing value is None."""

from __future__ import annotations

import json
import re
from typing import Any

from orchestrator.node.facts import sysfs

ROCM_SMI = [
    *("rocm-smi", "--showproductname", "--showuniqueid", "--showbus", "--showmeminfo", "vram"),
    *("--showuse", "--showdriverversion", "--showpids", "--json"),
]
NAMES = ("card series", "card model", "device name", "card sku", "gfx version")


def gpus(text: str) -> list[dict[str, Any]]:
    """Read rocm-smi's JSON, whose keys change their letters' case between versions."""
    cards = []
    for key, values in document(text).items():
        match = re.fullmatch(r"card(\d{1,6})", str(key))
        if not match or not isinstance(values, dict):
            continue
        fields = {str(name).lower(): text_of(value) for name, value in values.items()}
        names = [fields[name] for name in NAMES if fields.get(name)]
        cards.append(
            {
                "vendor": "amd",
                "index": int(match.group(1)),
                "uuid": fields.get("unique id", ""),
                "model": next((name for name in names if not name.startswith("0x")), ""),
                "pci": fields.get("pci bus", "").lower(),
                "memory": number(fields.get("vram total memory (b)", "")),
                "used": number(fields.get("vram total used memory (b)", "")),
                "busy": number(fields.get("gpu use (%)", "")),
            }
        )
    return sorted(cards, key=lambda gpu: int(gpu["index"]))


def driver(text: str) -> str:
    system = document(text).get("system")
    values = system.items() if isinstance(system, dict) else ()
    return next((text_of(v) for k, v in values if str(k).lower() == "driver version"), "")


def processes(text: str) -> list[dict[str, Any]]:
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
        holders.append({"pid": int(match.group(1)), "gpu": "", "used": used, "name": parts[0]})
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
