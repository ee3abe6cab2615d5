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
from typing import Any

from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.metrics import machine
from orchestrator.node.metrics.causes import Causes, Notice
from orchestrator.node.metrics.disks import Disks, paths_of
from orchestrator.node.metrics.gpus import Gpus
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
        self.causes = Causes(set(told_before(outputs, spec.node, self.about["host"])))
        self.machine = machine.Machine(root)
        self.disks = Disks(paths_of(spec.workdir, experiment), seconds)
        self.gpus = Gpus(seconds, root)
        self.root = root

    def go_on(self) -> None:
        """Sample until this process is killed."""
        self.machine.look()
        self.gpus.look()
        self.write({"about": self.about})
        due = time.monotonic()
        while True:
            due = max(due + self.seconds, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            for notice in self.sample():
                say(f"{notice.text} ({notice.fix})" if notice.fix else notice.text)

    def sample(self) -> list[Notice]:
        """Write one sample; return what it tells for the first time."""
        sample = self.machine.look()
        sample["disks"] = self.disks.look()
        gpus = self.gpus.look()
        if gpus:
            self.describe({name: gpus.pop(name) for name in ONCE if name in gpus})
            sample["gpu"] = gpus
        self.write(sample)
        notices = [*self.causes.look(sample), *self.stuck()]
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

    def stuck(self) -> Iterator[Notice]:
        """Tell what does not answer: its values are old, or missing."""
        if self.disks.stuck and "disk_stuck" not in self.causes.told:
            self.causes.told.add("disk_stuck")
            yield Notice("disk_stuck", f"the disk of {self.disks.stuck} does not answer", "")
        problem = self.gpus.problem
        if problem and "gpus_unknown" not in self.causes.told and os.path.exists("/dev/nvidiactl"):
            self.causes.told.add("gpus_unknown")
            yield Notice("gpus_unknown", f"no metrics of the GPUs: {problem}", "nvidia-smi")

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
            written = os.write(self.fd, line)
            if written < len(line):  # the disk became full within the line
                os.ftruncate(self.fd, os.fstat(self.fd).st_size - written)


def file_name(node: int, attempt: int) -> str:
    """Name the file of one attempt: another machine may take a node's place in the next one."""
    return f"node_{node:02d}_metrics{f'_{attempt}' if attempt > 1 else ''}.jsonl"


def told_before(outputs: str, node: int, host: str) -> Iterator[str]:
    """Yield the causes that earlier attempts on this machine told.

    On a disk that the nodes share, another machine may have had this node's place.
    """
    prefix = f"node_{node:02d}_metrics"
    with contextlib.suppress(OSError):
        for name in os.listdir(outputs):
            if name.startswith(prefix) and name.endswith(".jsonl"):
                own = True
                with open(os.path.join(outputs, name), "rb") as file:
                    for line in file:
                        with contextlib.suppress(ValueError, KeyError, TypeError):
                            if b'"about":' in line:
                                own = json.loads(line)["about"]["host"] == host
                            elif own and b'"cause":' in line:
                                yield str(json.loads(line)["cause"])


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
