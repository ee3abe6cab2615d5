"""Finds in samples what somebody should know: each cause is told once. Pure.

The words are the doctor's where it knows the same trouble (head/doctor/check_machine.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from orchestrator.common.text import size

SLOWED = 0x8  # bits of NVML's reasons why a clock is low: by the hardware, for the next two
TOO_HOT = 0x20 | 0x40
POWER_BRAKE = 0x80
IN_A_ROW = 3  # samples: a spike is nobody's trouble
SWAPS = 1 << 20  # bytes a second
FULL = 0.95  # of a disk
LOSSY, SEGMENTS = 0.02, 100  # a healthy network sends less than 0.1% again; of so many a second
SHM_LEAST = 16 << 20  # bytes: with less, NCCL cannot start
SHM = "/dev/shm"


class Notice(NamedTuple):
    """A cause, whom it concerns, and the words for the log with what to do."""

    cause: str
    text: str
    fix: str


class Causes:
    """Remembers what was told, and for how many samples a trouble has lasted."""

    def __init__(self, told: set[str]) -> None:
        self.told = told
        self.lasted: dict[str, int] = {}

    def look(self, sample: dict[str, Any]) -> list[Notice]:
        """Return what is new in this sample."""
        troubles = {notice.cause: (notice, least) for notice, least in every(sample)}
        self.lasted = {cause: self.lasted.get(cause, 0) + 1 for cause in troubles}
        found = []
        for cause, (notice, least) in troubles.items():
            if self.lasted[cause] >= least and cause not in self.told:
                self.told.add(cause)
                found.append(notice)
        return found


def every(sample: dict[str, Any]) -> Iterator[tuple[Notice, int]]:
    """Yield each trouble, and for how many samples it has to last."""
    yield from ((notice, IN_A_ROW) for notice in throttled(sample))
    yield from ((notice, 1) for notice in broken_memory(sample))
    yield from ((notice, 1) for notice in full(sample))
    sent, resent = sample.get("tcp_sent_per_s", 0), sample.get("tcp_resent_per_s", 0)
    if sent >= SEGMENTS and resent >= LOSSY * sent:
        words = f"its network loses packets: TCP sends {resent / sent:.1%} of them again"
        fix = "ip -s link; is it the cable, or too many senders for one port of the switch?"
        yield Notice("lossy_network", words, fix), IN_A_ROW
    if sample.get("swap_per_s", 0) > SWAPS:
        words = f"it swaps {size(sample['swap_per_s'], binary=True)} a second"
        words += f", {size(sample['swap_bytes'], binary=True)} of memory are on disk"
        yield Notice("swapping", words, "smaller batches, or fewer workers of the loader"), IN_A_ROW


def throttled(sample: dict[str, Any]) -> Iterator[Notice]:
    masks = sample.get("gpu", {}).get("throttle", [])
    heat = sample.get("gpu", {}).get("celsius", [])
    clocks = sample.get("gpu", {}).get("mhz", [])
    for cause, bits, why, fix in (
        ("gpu_too_hot", TOO_HOT, "too hot", "look at its fans and at the air"),
        ("gpu_power_brake", POWER_BRAKE, "its power supply asks for it", "look at the power"),
        ("gpu_slowed", SLOWED, "its hardware asks for it", "nvidia-smi -q -d PERFORMANCE"),
    ):
        slow = [at for at, mask in enumerate(masks) if mask and int(mask) & bits]
        # The hardware's slowdown is also set beside what causes it.
        if cause == "gpu_slowed":
            slow = [at for at in slow if not int(masks[at]) & (TOO_HOT | POWER_BRAKE)]
        if slow:
            each = (f"GPU {at}{state(at, (heat, ' C'), (clocks, ' MHz'))}" for at in slow)
            yield Notice(cause, f"{', '.join(each)}: slowed down, {why}", fix)


def state(at: int, *columns: tuple[list[Any], str]) -> str:
    """Return what is known of a GPU in brackets: (88 C, 1200 MHz)."""
    known = [f"{each[at]}{unit}" for each, unit in columns if at < len(each) and each[at]]
    return f" ({', '.join(known)})" if known else ""


def broken_memory(sample: dict[str, Any]) -> Iterator[Notice]:
    for at, count in enumerate(sample.get("gpu", {}).get("ecc_uncorrected", [])):
        if count:
            words = f"GPU {at}: {count} uncorrected memory errors since its driver started"
            yield Notice(f"ecc_gpu_{at}", words, "reset it; replace it if they recur")


def full(sample: dict[str, Any]) -> Iterator[Notice]:
    for point, (free, total) in sample.get("disks", {}).items():
        room = f"{size(free, binary=True)} free of {size(total, binary=True)}"
        if point == SHM:
            if free < SHM_LEAST:
                yield Notice("shm_full", f"{point} is full: {room}", f"ls -la {point}")
        elif total and free < (1 - FULL) * total:
            fix = f"df -h {point}; orchestrator prune --keep 5 --on-nodes"
            yield Notice(f"disk_full {point}", f"{point}: {room}", fix)
