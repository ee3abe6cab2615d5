"""Samples this machine while a job runs: `sample JOB PART ATTEMPT`, a child of the supervisor.

It is a process of its own, so that a driver or a disk that hangs blocks nothing else. It appends
lines of JSON to outputs/node_<NN>_metrics.jsonl of the experiment, which is fetched like all
metrics. Its messages for the job's log go to standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from orchestrator.common import files
from orchestrator.common.text import format_bytes
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.machine import amd, compile_caches, nvidia, sysfs
from orchestrator.node.machine.disks import SHM, disk_space, mount_point
from orchestrator.protocol.spec import Spec

# The interval between two samples.
SECONDS = 5.0
# These values of a GPU are constant, so they are not in every sample.
ONCE = ("memory_total_bytes", "watts_most")


class Sampler:
    """Samples one machine for one job."""

    def __init__(self, spec: Spec, root: str = "", seconds: float = SECONDS) -> None:
        experiment = spec.env["ORCHESTRATOR_EXPERIMENT"]
        self.node, self.seconds = spec.node, seconds
        outputs = os.path.join(experiment, "outputs")
        self.lines = Lines(os.path.join(outputs, file_name(spec.node, spec.attempt)))
        self.about = {**constant_facts(root), "seconds": seconds}
        self.causes = Causes()
        self.machine = Counters(root)
        places = filter(os.path.isdir, (experiment, spec.workdir, "/tmp", SHM))
        self.disks = sorted({mount_point(os.path.realpath(place)) for place in places})
        self.gpus = (
            nvidia.NvidiaSampling(root) if shutil.which("nvidia-smi") else amd.AmdSampling(root)
        )

    def go_on(self) -> None:
        """Sample until this process is killed."""
        self.machine.sample()
        self.gpus.sample()
        self.write({"about": self.about})
        due = time.monotonic()
        while True:
            due = max(due + self.seconds, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            for notice in self.sample():
                print_line(f"{notice.text} ({notice.fix})" if notice.fix else notice.text)

    def sample(self) -> list[Notice]:
        """Write one sample; return the notices that are new in it."""
        sample = self.machine.sample()
        sample["disks"] = {point: room for point in self.disks if (room := disk_space(point))}
        gpus = self.gpus.sample()
        if gpus:
            self.describe({name: gpus.pop(name) for name in ONCE if name in gpus})
            sample["gpu"] = gpus
        self.write(sample)
        return self.causes.judge({**sample, "gpus_unknown": self.gpus.problem})

    def describe(self, gpus: dict[str, Any]) -> None:
        """Write the GPUs once, and again after their power limit was changed."""
        models, places = self.gpus.models, self.gpus.places
        about = {**self.about, "gpus": models, "gpus_at": places, "gpu": gpus}
        if about != self.about:
            self.about = about
            self.write({"about": about})

    def write(self, data: dict[str, Any]) -> None:
        self.lines.write({"time": round(time.time(), 3), "node": self.node, **data})


class Lines:
    """A file of JSON lines. A full disk costs lines, never the job."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = -1

    def write(self, data: dict[str, Any]) -> None:
        line = json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n"
        with contextlib.suppress(OSError):
            if self.fd < 0:
                self.fd = files.open_to_append(self.path)
            files.append_lines(self.fd, line)


def file_name(node: int, attempt: int) -> str:
    """Return the file name of one attempt: in the next, another machine may be this node."""
    return f"node_{node:02d}_metrics{f'_{attempt}' if attempt > 1 else ''}.jsonl"


def print_line(text: str) -> None:
    os.write(1, f"orchestrator: {text}\n".encode("utf-8", "replace"))


def main(job: str, part: str, attempt: str) -> None:
    """Sample for a job, whose supervisor is this process's parent."""
    spec = RunDir(job, int(part), int(attempt)).read_spec()
    experiment = spec.env.get("ORCHESTRATOR_EXPERIMENT", "")
    if not os.path.isdir(os.path.join(experiment, "outputs")):
        # The job has no outputs, for example if it was started by hand.
        return
    compile_caches.prune_caches(time.time())
    # The supervisor is gone.
    with contextlib.suppress(BrokenPipeError):
        Sampler(spec).go_on()


# NVML's reasons for a low clock: hardware, heat, power brake.
SLOWED = 0x8 | 0x20 | 0x40 | 0x80
# A notice needs this many samples in a row, so that a spike causes none.
IN_A_ROW = 3
# In bytes per second.
SWAPS = 1 << 20
# The fraction of a disk above which it counts as full.
FULL = 0.95
# With less, NCCL cannot start.
SHM_LEAST_BYTES = 16 << 20


class Notice(NamedTuple):
    """A cause, with the text for the log and what to do about it."""

    cause: str
    text: str
    fix: str


class Causes:
    """Remembers which notices were given, and for how many samples each cause has lasted."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.lasted: dict[str, int] = {}

    def judge(self, sample: dict[str, Any]) -> list[Notice]:
        """Return the notices that are new in this sample."""
        troubles = {notice.cause: (notice, least) for notice, least in all_notices(sample)}
        self.lasted = {cause: self.lasted.get(cause, 0) + 1 for cause in troubles}
        found = []
        for cause, (notice, least) in troubles.items():
            if self.lasted[cause] >= least and cause not in self.known:
                self.known.add(cause)
                found.append(notice)
        return found


def all_notices(sample: dict[str, Any]) -> Iterator[tuple[Notice, int]]:
    """Yield each notice with the number of samples for which its cause must last."""
    yield from ((notice, IN_A_ROW) for notice in throttle_notices(sample))
    yield from ((notice, 1) for notice in broken_memory(sample))
    yield from ((notice, 1) for notice in full_notices(sample))
    if problem := sample.get("gpus_unknown"):
        yield Notice("gpus_unknown", f"no metrics of the GPUs: {problem}", "nvidia-smi"), 1
    if sample.get("swap_per_s", 0) > SWAPS:
        words = f"it swaps {format_bytes(sample['swap_per_s'], binary=True)} a second"
        words += f", {format_bytes(sample['swap_bytes'], binary=True)} of memory are on disk"
        yield Notice("swapping", words, "smaller batches, or fewer workers of the loader"), IN_A_ROW


def throttle_notices(sample: dict[str, Any]) -> Iterator[Notice]:
    gpus = sample.get("gpu", {})
    slow = [at for at, mask in enumerate(gpus.get("throttle", [])) if mask and int(mask) & SLOWED]
    heat, clocks = gpus.get("celsius", []), gpus.get("mhz", [])
    if slow:
        each = (f"GPU {at}{gpu_state(at, (heat, ' C'), (clocks, ' MHz'))}" for at in slow)
        words = f"{', '.join(each)}: slowed down by heat or by its power supply"
        yield Notice("gpu_slowed", words, "nvidia-smi -q -d PERFORMANCE")


def gpu_state(at: int, *columns: tuple[list[Any], str]) -> str:
    """Return the known values of a GPU in brackets: (88 C, 1200 MHz)."""
    known = [f"{each[at]}{unit}" for each, unit in columns if at < len(each) and each[at]]
    return f" ({', '.join(known)})" if known else ""


def broken_memory(sample: dict[str, Any]) -> Iterator[Notice]:
    for at, count in enumerate(sample.get("gpu", {}).get("ecc_uncorrected", [])):
        if count:
            words = f"GPU {at}: {count} uncorrected memory errors since its driver started"
            yield Notice(f"ecc_gpu_{at}", words, "reset it; replace it if they recur")


def full_notices(sample: dict[str, Any]) -> Iterator[Notice]:
    for point, (free, total) in sample.get("disks", {}).items():
        room = f"{format_bytes(free, binary=True)} free of {format_bytes(total, binary=True)}"
        if point == SHM:
            if free < SHM_LEAST_BYTES:
                yield Notice("shm_full", f"{point} is full: {room}", f"ls -la {point}")
        elif total and free < (1 - FULL) * total:
            fix = f"df -h {point}; orchestrator prune --keep 5 --on-nodes"
            yield Notice(f"disk_full {point}", f"{point}: {room}", fix)


# -- the kernel's counters -------------------------------------------------------------------------

# The unit of /proc/diskstats, independent of the disk's own sectors.
SECTOR_BYTES = 512
# The unit of port_xmit_data.
RDMA_WORD_BYTES = 4
PAGE = os.sysconf("SC_PAGE_SIZE")


def constant_facts(root: str = "") -> dict[str, Any]:
    """Return the facts that stay constant while a job runs, as far as files show them."""
    sizes = sysfs.read_meminfo(root)
    return {
        "host": socket.gethostname(),
        "cpus": os.cpu_count() or 1,
        "memory_bytes": sizes.get("MemTotal", 0),
        "swap_bytes": sizes.get("SwapTotal", 0),
    }


class Counters:
    """The load of this machine, from /proc and /sys: counters become rates between two looks.

    A look takes about half a millisecond. Unreadable values are left out.
    """

    def __init__(self, root: str = "") -> None:
        self.root = root
        self.before: dict[str, tuple[int, ...]] = {}
        self.at = 0.0
        self.disks: dict[str, bool] = {}

    def sample(self) -> dict[str, Any]:
        """Return shares and bytes now, and rates since the last look; the first has no rates."""
        now = time.monotonic()
        seconds, self.at = now - self.at, now
        before, self.before = self.before, self.counters()
        sample = self.levels()
        if before:
            sample.update(counter_rates(before, self.before, seconds))
        return sample

    def levels(self) -> dict[str, Any]:
        sizes = sysfs.read_meminfo(self.root)
        load = sysfs.read_text(f"{self.root}/proc/loadavg").split()
        return {
            "load": float(load[0]) if load else 0.0,
            "memory_bytes": sizes.get("MemTotal", 0) - sizes.get("MemAvailable", 0),
            "swap_bytes": sizes.get("SwapTotal", 0) - sizes.get("SwapFree", 0),
        }

    def counters(self) -> dict[str, tuple[int, ...]]:
        """Return counters by name that only grow: processor time, and bytes of everything else."""
        counters: dict[str, tuple[int, ...]] = {}
        cpu = sysfs.read_text(f"{self.root}/proc/stat", 1 << 20).partition("\n")[0].split()
        if len(cpu) > 8:
            # A guest's time is part of the user time, so its fields are left out.
            times = [int(word) for word in cpu[1:9]]
            idle, waits = times[3], times[4]
            counters["cpu"] = (sum(times) - idle - waits, waits, sum(times))
        swapped = {"pswpin": 0, "pswpout": 0}
        for line in sysfs.read_text(f"{self.root}/proc/vmstat").splitlines():
            name, _, count = line.partition(" ")
            if name in swapped:
                swapped[name] = int(count)
        counters["swap"] = (sum(swapped.values()) * PAGE,)
        counters["disk"] = self.disk_bytes()
        for interface, moved in sysfs.network_bytes(self.root).items():
            counters[f"net {interface}"] = moved
        return {**counters, **self.rdma_bytes()}

    def disk_bytes(self) -> tuple[int, int]:
        """Return the bytes read from and written to whole disks, which include partitions."""
        read = written = 0
        for line in sysfs.read_text(f"{self.root}/proc/diskstats", 1 << 18).splitlines():
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
        """Return the bytes moved by RDMA for each port, which no interface counts."""
        top = f"{self.root}/sys/class/infiniband"
        counters: dict[str, tuple[int, ...]] = {}
        for card in sysfs.list_names(top):
            for port in sysfs.list_names(f"{top}/{card}/ports"):
                directory = f"{top}/{card}/ports/{port}/counters"
                received = sysfs.read_number(f"{directory}/port_rcv_data")
                sent = sysfs.read_number(f"{directory}/port_xmit_data")
                if received is not None and sent is not None:
                    counters[f"net {card}/{port}"] = (
                        received * RDMA_WORD_BYTES,
                        sent * RDMA_WORD_BYTES,
                    )
        return counters


def counter_rates(
    before: dict[str, tuple[int, ...]], now: dict[str, tuple[int, ...]], seconds: float
) -> dict[str, Any]:
    """Return the rates between two looks; a counter that fell was reset, and counts as zero."""
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
