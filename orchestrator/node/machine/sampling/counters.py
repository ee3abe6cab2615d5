"""Reads from /proc and /sys what this machine does: counters become rates between two looks.

A look takes about half a millisecond. What cannot be read is left out.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from orchestrator.node.machine import sysfs

SECTOR_BYTES = 512  # of /proc/diskstats, whatever the disk's own are
RDMA_WORD_BYTES = 4  # of port_xmit_data
PAGE = os.sysconf("SC_PAGE_SIZE")


def about(root: str = "") -> dict[str, Any]:
    """Return what does not change while a job runs, as far as files tell it."""
    sizes = sysfs.meminfo(root)
    return {
        "host": socket.gethostname(),
        "cpus": os.cpu_count() or 1,
        "memory_bytes": sizes.get("MemTotal", 0),
        "swap_bytes": sizes.get("SwapTotal", 0),
    }


class Machine:
    """Remembers the counters of the last look."""

    def __init__(self, root: str = "") -> None:
        self.root = root
        self.before: dict[str, tuple[int, ...]] = {}
        self.at = 0.0
        self.disks: dict[str, bool] = {}

    def sample(self) -> dict[str, Any]:
        """Return shares and bytes now, and rates since the last look; at first there are none."""
        now = time.monotonic()
        seconds, self.at = now - self.at, now
        before, self.before = self.before, self.counters()
        sample = self.levels()
        if before:
            sample.update(rates(before, self.before, seconds))
        return sample

    def levels(self) -> dict[str, Any]:
        sizes = sysfs.meminfo(self.root)
        load = sysfs.text(f"{self.root}/proc/loadavg").split()
        return {
            "load": float(load[0]) if load else 0.0,
            "memory_bytes": sizes.get("MemTotal", 0) - sizes.get("MemAvailable", 0),
            "swap_bytes": sizes.get("SwapTotal", 0) - sizes.get("SwapFree", 0),
        }

    def counters(self) -> dict[str, tuple[int, ...]]:
        """Return name -> numbers that only grow: time of the processors, bytes of all else."""
        counters: dict[str, tuple[int, ...]] = {}
        cpu = sysfs.text(f"{self.root}/proc/stat", 1 << 20).partition("\n")[0].split()
        if len(cpu) > 8:
            times = [int(word) for word in cpu[1:9]]  # a guest's time is in user's, too
            idle, waits = times[3], times[4]
            counters["cpu"] = (sum(times) - idle - waits, waits, sum(times))
        swapped = {"pswpin": 0, "pswpout": 0}
        for line in sysfs.text(f"{self.root}/proc/vmstat").splitlines():
            name, _, count = line.partition(" ")
            if name in swapped:
                swapped[name] = int(count)
        counters["swap"] = (sum(swapped.values()) * PAGE,)
        counters["disk"] = self.disk_bytes()
        for interface, moved in sysfs.network_bytes(self.root).items():
            counters[f"net {interface}"] = moved
        return {**counters, **self.rdma_bytes()}

    def disk_bytes(self) -> tuple[int, int]:
        """Sum what was read from and written to whole disks: a partition's bytes are its disk's."""
        read = written = 0
        for line in sysfs.text(f"{self.root}/proc/diskstats", 1 << 18).splitlines():
            fields = line.split()
            if len(fields) > 9 and self.is_disk(fields[2]):
                read, written = read + int(fields[5]), written + int(fields[9])
        return read * SECTOR_BYTES, written * SECTOR_BYTES

    def is_disk(self, name: str) -> bool:
        if name not in self.disks:
            path = f"{self.root}/sys/block/{name.replace('/', '!')}/device"
            self.disks[name] = os.path.exists(path)
        return self.disks[name]

    def rdma_bytes(self) -> dict[str, tuple[int, ...]]:
        """Return what RDMA moved, port by port: an interface does not count it."""
        top = f"{self.root}/sys/class/infiniband"
        counters: dict[str, tuple[int, ...]] = {}
        for card in sysfs.names(top):
            for port in sysfs.names(f"{top}/{card}/ports"):
                directory = f"{top}/{card}/ports/{port}/counters"
                received = sysfs.number(f"{directory}/port_rcv_data")
                sent = sysfs.number(f"{directory}/port_xmit_data")
                if received is not None and sent is not None:
                    counters[f"net {card}/{port}"] = (
                        received * RDMA_WORD_BYTES,
                        sent * RDMA_WORD_BYTES,
                    )
        return counters


def rates(
    before: dict[str, tuple[int, ...]], now: dict[str, tuple[int, ...]], seconds: float
) -> dict[str, Any]:
    """Return what went on between two looks; a counter that fell was reset, and counts nothing."""
    grown = {
        name: tuple(max(0, each - was[at]) for at, each in enumerate(now[name]))
        for name, was in before.items()
        if name in now
    }
    sample: dict[str, Any] = {}
    if grown.get("cpu", (0, 0, 0))[2]:
        busy, waits, whole = grown["cpu"]
        sample.update(cpu=round(busy / whole, 4), iowait=round(waits / whole, 4))
    per_second = {name: [round(v / seconds) for v in each] for name, each in grown.items()}
    if "swap" in per_second:
        sample["swap_per_s"] = per_second["swap"][0]
    if "disk" in per_second:
        sample["disk_read_per_s"], sample["disk_write_per_s"] = per_second["disk"]
    sample["net"] = {
        name.partition(" ")[2]: pair
        for name, pair in per_second.items()
        if name.startswith("net ") and any(pair)
    }
    return sample
