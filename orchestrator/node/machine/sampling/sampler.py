"""Samples this machine for as long as a job runs: `sample JOB NODE`, a child of the supervisor.

It is a process of its own, so that a driver or a disk that hangs disturbs nobody. It appends
lines of JSON to outputs/node_<NN>_metrics.jsonl of the experiment, which comes home as all metrics
do, and says on standard output what the job's log should tell.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from orchestrator.common import files
from orchestrator.common.text import size
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.machine.disks import Disks, paths_of
from orchestrator.node.machine.gpus.sampling import Gpus
from orchestrator.node.machine.sampling import counters as machine
from orchestrator.protocol.spec import Spec

SECONDS = 5.0  # between two samples
ONCE = ("memory_total_bytes", "watts_most")  # of a GPU: not in every sample


class Sampler:
    """Samples one machine for one job."""

    def __init__(self, spec: Spec, root: str = "", seconds: float = SECONDS) -> None:
        experiment = spec.env["ORCHESTRATOR_EXPERIMENT"]
        self.node, self.seconds = spec.node, seconds
        number = spec.attempt.number if spec.attempt else 1
        outputs = os.path.join(experiment, "outputs")
        self.lines = Lines(os.path.join(outputs, file_name(spec.node, number)))
        self.about = {**machine.about(root), "seconds": seconds}
        self.causes = Causes(set())
        self.machine = machine.Machine(root)
        self.disks = Disks(paths_of(spec.workdir, experiment))
        self.gpus = Gpus(root)

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
                say(f"{notice.text} ({notice.fix})" if notice.fix else notice.text)

    def sample(self) -> list[Notice]:
        """Write one sample; return what it tells for the first time."""
        sample = self.machine.sample()
        sample["disks"] = self.disks.sample()
        gpus = self.gpus.sample()
        if gpus:
            self.describe({name: gpus.pop(name) for name in ONCE if name in gpus})
            sample["gpu"] = gpus
        self.write(sample)
        notices = self.causes.judge({**sample, "gpus_unknown": self.gpus.nvidia.problem})
        for notice in notices:
            self.write({"cause": notice.cause, "text": notice.text, "fix": notice.fix})
        return notices

    def describe(self, gpus: dict[str, Any]) -> None:
        """Say once which GPUs there are, and again when their power limit was changed."""
        models, places = self.gpus.models, self.gpus.places
        about = {**self.about, "gpus": models, "gpus_at": places, "gpu": gpus}
        if about != self.about:
            self.about = about
            self.write({"about": about})

    def write(self, data: dict[str, Any]) -> None:
        self.lines.write({"time": round(time.time(), 3), "node": self.node, **data})


class Lines:
    """A file of JSON lines. A disk that takes no more costs lines, never the job."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = -1

    def write(self, data: dict[str, Any]) -> None:
        line = json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n"
        with contextlib.suppress(OSError):
            if self.fd < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
                self.fd = os.open(self.path, flags, 0o600)
            files.append_lines(self.fd, line)


def file_name(node: int, attempt: int) -> str:
    """Name the file of one attempt: another machine may take a node's place in the next one."""
    return f"node_{node:02d}_metrics{f'_{attempt}' if attempt > 1 else ''}.jsonl"


def say(text: str) -> None:
    os.write(1, f"orchestrator: {text}\n".encode("utf-8", "replace"))


def main(job: str, node: str) -> None:
    """Sample for a job, whose supervisor is this process's parent."""
    spec = RunDir(job, int(node)).read_spec()
    experiment = spec.env.get("ORCHESTRATOR_EXPERIMENT", "")
    if not os.path.isdir(os.path.join(experiment, "outputs")):
        return  # a job that has none, as one that was started by hand
    with contextlib.suppress(BrokenPipeError):  # the supervisor is gone
        Sampler(spec).go_on()


SLOWED = 0x8 | 0x20 | 0x40 | 0x80  # of NVML's reasons for a low clock: hardware, heat, power brake
IN_A_ROW = 3  # samples: a spike is nobody's trouble
SWAPS = 1 << 20  # bytes a second
FULL = 0.95  # of a disk
SHM_LEAST_BYTES = 16 << 20  # with less, NCCL cannot start
SHM = "/dev/shm"


class Notice(NamedTuple):
    """A cause, whom it concerns, and the words for the log with what to do."""

    cause: str
    text: str
    fix: str


class Causes:
    """Remembers what was told, and for how many samples a trouble has lasted."""

    def __init__(self, known: set[str]) -> None:
        self.known = known
        self.lasted: dict[str, int] = {}

    def judge(self, sample: dict[str, Any]) -> list[Notice]:
        """Return what is new in this sample."""
        troubles = {notice.cause: (notice, least) for notice, least in every(sample)}
        self.lasted = {cause: self.lasted.get(cause, 0) + 1 for cause in troubles}
        found = []
        for cause, (notice, least) in troubles.items():
            if self.lasted[cause] >= least and cause not in self.known:
                self.known.add(cause)
                found.append(notice)
        return found


def every(sample: dict[str, Any]) -> Iterator[tuple[Notice, int]]:
    """Yield each trouble, and for how many samples it has to last."""
    yield from ((notice, IN_A_ROW) for notice in throttled(sample))
    yield from ((notice, 1) for notice in broken_memory(sample))
    yield from ((notice, 1) for notice in full(sample))
    if problem := sample.get("gpus_unknown"):
        yield Notice("gpus_unknown", f"no metrics of the GPUs: {problem}", "nvidia-smi"), 1
    if sample.get("swap_per_s", 0) > SWAPS:
        words = f"it swaps {size(sample['swap_per_s'], binary=True)} a second"
        words += f", {size(sample['swap_bytes'], binary=True)} of memory are on disk"
        yield Notice("swapping", words, "smaller batches, or fewer workers of the loader"), IN_A_ROW


def throttled(sample: dict[str, Any]) -> Iterator[Notice]:
    gpus = sample.get("gpu", {})
    slow = [at for at, mask in enumerate(gpus.get("throttle", [])) if mask and int(mask) & SLOWED]
    heat, clocks = gpus.get("celsius", []), gpus.get("mhz", [])
    if slow:
        each = (f"GPU {at}{state(at, (heat, ' C'), (clocks, ' MHz'))}" for at in slow)
        words = f"{', '.join(each)}: slowed down by heat or by its power supply"
        yield Notice("gpu_slowed", words, "nvidia-smi -q -d PERFORMANCE")


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
            if free < SHM_LEAST_BYTES:
                yield Notice("shm_full", f"{point} is full: {room}", f"ls -la {point}")
        elif total and free < (1 - FULL) * total:
            fix = f"df -h {point}; orchestrator prune --keep 5 --on-nodes"
            yield Notice(f"disk_full {point}", f"{point}: {room}", fix)
