"""The state of all jobs in Prometheus' format, and the server of /metrics."""

from __future__ import annotations

import hmac
import math
import re
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from orchestrator.common.errors import OrchestratorError
from orchestrator.common.hosts import is_this_machine
from orchestrator.config.launch import Where
from orchestrator.records import experiments, goodput
from orchestrator.records.experiment import RECORD, Experiment, JobRecord
from orchestrator.records.metrics import samples, trainers
from orchestrator.records.metrics.samples import Sample
from orchestrator.records.metrics.trainers import Point

# A job that is over is still exported for this time, so that an alarm sees it.
STAYS_SECONDS = 3600.0
# A node's sample that is older is not exported.
OLD_SECONDS = 60.0
# The limit of a program's own metrics.
MOST_NAMES = 50

# The help text of each metric, by its name without the prefix.
HELP = {
    "job_state": "1 for the state that the job is in",
    "job_attempt": "the attempt that runs, or ran last",
    "job_started_timestamp_seconds": "when the job was started",
    "job_goodput_ratio": "the part of the time that went into training",
    "step": "the step that a rank has reached",
    "step_seconds": "how long a step takes",
    "step_part_seconds": "what a step's time goes into",
    "loss": "of the last step that was logged",
    "tokens_per_second": "tokens, targets or samples per second",
    "mfu_ratio": "model FLOPs used, of what the device's vendor promises",
    "left_seconds": "how long the training will go on, as its ranks reckon",
    "rank_memory_bytes": "device memory (without one: memory) that a rank uses",
    "rank_told_timestamp_seconds": "when the rank wrote its last line",
    "metric": "what else a rank measures, by name",
    "node_cpu_ratio": "processors in use",
    "node_iowait_ratio": "processors that wait for a disk",
    "node_load": "processes that run or want to",
    "node_memory_bytes": "memory in use",
    "node_swap_bytes": "swap in use",
    "node_disk_read_bytes_per_second": "read from all disks",
    "node_disk_written_bytes_per_second": "written to all disks",
    "node_disk_free_bytes": "free space of a file system",
    "node_network_received_bytes_per_second": "received by an interface or RDMA port",
    "node_network_sent_bytes_per_second": "sent by an interface or RDMA port",
    "node_gpu": "what a GPU says of itself, by name: use (0 to 1), memory_bytes, celsius, ...",
}
# From a key of the metrics file to the metric's name, and the divisor of the value.
OF_RANK = {
    "step": ("step", 1.0),
    "step_ms": ("step_seconds", 1e3),
    "loss": ("loss", 1.0),
    "tokens_per_s": ("tokens_per_second", 1.0),
    "mfu": ("mfu_ratio", 1.0),
    "left_s": ("left_seconds", 1.0),
    "memory_bytes": ("rank_memory_bytes", 1.0),
    "time": ("rank_told_timestamp_seconds", 1.0),
}
PARTS = ("data_ms", "forward_backward_ms", "exposed_comm_ms", "optimizer_ms")
OF_NODE = {
    "cpu": "node_cpu_ratio",
    "iowait": "node_iowait_ratio",
    "load": "node_load",
    "memory": "node_memory_bytes",
    "swap": "node_swap_bytes",
    "disk_read": "node_disk_read_bytes_per_second",
    "disk_write": "node_disk_written_bytes_per_second",
}

# The name, the labels and the value.
Metric = tuple[str, dict[str, str], float]


@dataclass
class Exposition:
    """All experiments of a directory. Records that did not change are not read again."""

    where: Where
    records: dict[Path, tuple[float, JobRecord | None]] = field(default_factory=dict)

    def text(self) -> str:
        return format_metrics(self.points(time.time()))

    def points(self, now: float) -> Iterator[Metric]:
        for each, record in self.current(now):
            labels = {"experiment": each.name}
            yield from of_job(record, labels)
            files = trainers.newest_metrics_files(each.path / "outputs")
            for node in record.nodes:
                for rank in node.numbers:
                    of = {**labels, "node": node.name, "rank": str(rank)}
                    yield from of_rank(
                        trainers.read_last_values(files.get(rank)), of, record, node.index
                    )
                path = samples.newest_sample_file(each.path / "outputs", node.index)
                if path is None or record.over:
                    continue
                if (last := samples.read_last_samples(path)) and now - changed(path) < OLD_SECONDS:
                    yield from of_node(last[-1], {**labels, "node": node.name})

    def current(self, now: float) -> Iterator[tuple[Experiment, JobRecord]]:
        """Yield the experiments that run, or ended within STAYS_SECONDS."""
        known = dict[Path, tuple[float, JobRecord | None]]()
        for each in experiments.list_experiments(self.where):
            try:
                changed = (each.path / RECORD).stat().st_mtime
                before = self.records.get(each.path)
                if before is None or before[0] != changed:
                    before = changed, each.read_record()
            except (OSError, OrchestratorError):
                # It may be about to be created or removed, or belong to another user.
                continue
            record = before[1]
            if record is not None and record.over and now - (record.ended or 0.0) > STAYS_SECONDS:
                record = None
            known[each.path] = changed, record
            if record is not None:
                yield each, record
        self.records = known


def changed(path: Path) -> float:
    """Return when a file grew by this machine's clock: the times in it may be wrong."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def of_job(record: JobRecord, labels: dict[str, str]) -> Iterator[Metric]:
    yield "job_state", {**labels, "state": record.state}, 1
    yield "job_attempt", labels, record.attempt
    yield "job_started_timestamp_seconds", labels, record.started
    # The goodput of a program that reports nothing is unknown.
    if goodput.shares_in_words(record.goodput):
        whole = sum(record.goodput.values())
        yield "job_goodput_ratio", labels, record.goodput.get("training", 0.0) / whole


def of_rank(point: Point, labels: dict[str, str], record: JobRecord, node: int) -> Iterator[Metric]:
    """Yield a rank's last metrics, with the time of a line by this machine's clock."""
    for name, (help_text, divided) in OF_RANK.items():
        if (value := point.number(name)) is not None:
            known = goodput.head_time(record, value, node) if name == "time" else value / divided
            yield help_text, labels, known
    if point.loss_is_lost:
        yield "loss", labels, math.nan
    for name in PARTS:
        if (value := point.number(name)) is not None:
            part = name.removesuffix("_ms")
            yield "step_part_seconds", {**labels, "part": part}, value / 1e3
    for name, value in point.numbers(MOST_NAMES, (*OF_RANK, *PARTS, "rank")).items():
        yield "metric", {**labels, "name": name}, value


def of_node(sample: Sample, labels: dict[str, str]) -> Iterator[Metric]:
    for name, help_text in OF_NODE.items():
        if (value := getattr(sample, name)) is not None:
            yield help_text, labels, value
    for interface, (received, sent) in sample.net.items():
        which = {**labels, "interface": interface}
        yield "node_network_received_bytes_per_second", which, received
        yield "node_network_sent_bytes_per_second", which, sent
    for mount, (free, _) in sample.disks.items():
        yield "node_disk_free_bytes", {**labels, "mount": mount}, free
    for name, values in sample.gpus.items():
        for gpu, value in enumerate(values):
            if value is not None:
                yield "node_gpu", {**labels, "gpu": str(gpu), "name": name}, value


# -- the text ---------------------------------------------------------------------------------


def format_metrics(points: Iterable[Metric]) -> str:
    """Format metrics as version 0.0.4 of the text format: those of one name stand together."""
    by_name: dict[str, dict[str, float]] = {}
    for name, labels, value in points:
        inside = ",".join(f'{label}="{escaped(each)}"' for label, each in labels.items())
        # Prometheus rejects the whole scrape if a series occurs twice, such as after a cut name.
        by_name.setdefault(name, {}).setdefault(f"orchestrator_{name}{{{inside}}}", value)
    text = []
    for name, what in HELP.items():
        if name in by_name:
            text.append(f"# HELP orchestrator_{name} {what}")
            text.append(f"# TYPE orchestrator_{name} gauge")
            text += (
                f"{series} {'NaN' if math.isnan(value) else repr(value)}"
                for series, value in by_name[name].items()
            )
    return "".join(f"{line}\n" for line in text)


def escaped(value: str) -> str:
    value = value[:200].encode("utf-8", "replace").decode()
    value = value.replace("\\", r"\\").replace('"', r"\"")
    return re.sub(r"[\x00-\x1f\x7f]", lambda found: r"\n" if found[0] == "\n" else "?", value)


# -- server ----------------------------------------------------------------------------------------


def metrics_app(exposition: Exposition, token: str) -> Starlette:
    """Return the server of /metrics; with a token, it answers only clients that send it."""
    # Concurrent scrapes would read the same files.
    one_at_a_time = threading.Lock()

    def metrics(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        if not token and not is_this_machine(request.headers.get("host", "")):
            return PlainTextResponse("another machine is meant", 421)
        if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            return PlainTextResponse("", 401, {"WWW-Authenticate": "Bearer"})
        with one_at_a_time:
            text = exposition.text()
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    return Starlette(routes=[Route("/metrics", metrics)])
