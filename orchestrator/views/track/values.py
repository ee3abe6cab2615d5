"""Read the numbers of a line of metrics, each under the name that a tracker shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.records import node_metrics
from orchestrator.records.last_metrics import number, shortened
from orchestrator.records.node_metrics import NodeSample

MOST = 200  # values of one line
NO_CURVE = ("time", "rank", "step", "steps", "left_s")


def of_rank(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line that a rank wrote."""
    return {
        shortened(name): value
        for name in list(line)[:MOST]
        if name not in NO_CURVE and (value := number(line, name)) is not None
    }


def of_node(line: dict[str, Any], host: str) -> dict[str, float]:
    """Return the numbers of a line that a node's sampler wrote; none if it is no sample."""
    found = node_metrics.sample(line)
    return {} if found is None else {f"node/{host}/{name}": v for name, v in named(found)}


def named(sample: NodeSample) -> Iterator[tuple[str, float]]:
    """Yield the names and values of a sample, as far as they are known."""
    for name in ("cpu", "iowait", "load", "memory", "swap", "disk_read", "disk_write"):
        value = getattr(sample, name)
        if value is not None:
            yield name, value
    for interface, (received, sent) in sample.net.items():
        yield f"net/{interface}/received", received
        yield f"net/{interface}/sent", sent
    for mount, (free, size) in sample.disks.items():
        if size:
            yield f"disk{mount.rstrip('/')}/used", 1 - free / size  # never an empty part
    for name, values in sample.gpus.items():
        for gpu, value in enumerate(values):
            if value is not None:
                yield f"gpu/{gpu}/{name}", value
