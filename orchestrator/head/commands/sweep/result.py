"""Reads the metric by which members are compared: a Trainer's, or one that a program prints."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path

from orchestrator.common.errors import nearest
from orchestrator.head.follow.streams.node_logs import log_files
from orchestrator.head.status.comparison import first_files, read_curves
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.metrics.step_lines import GAP

NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf)"
LONGEST_LINE = 1 << 16


def last_value(experiment: Experiment, record: JobRecord, metric: str) -> tuple[float | None, str]:
    """Return the last value of a metric, or None and the reason."""
    outputs, names = experiment.path / "outputs", list[str]()
    values: list[float] = []
    for _, curves in sorted(read_curves(first_files(outputs)).items(), reverse=True):
        names += curves
        if not values and metric in curves:
            values = list(curves[metric].means)
    if not values:
        logs = log_files(experiment, record.nodes)
        values = [value for log in logs for value in printed(log.text, metric)]
    if not values:
        return None, f"nothing measured or printed {metric}{nearest(metric, names)}"
    if not math.isfinite(values[-1]):
        return None, f"the last {metric} is {values[-1]}"
    return values[-1], ""


def printed(log: Path, metric: str) -> Iterator[float]:
    """Yield the values that lines of a log give a metric: val_bpb: 0.98, val_bpb=0.98."""
    name = re.escape(metric)
    wanted = re.compile(rf"(?<![\w./-]){name}[\"']?{GAP}[:=]?{GAP}{NUMBER}(?![\w.])", re.I)
    with contextlib.suppress(FileNotFoundError), log.open(errors="replace") as lines:
        for line in lines:
            for match in wanted.finditer(line[:LONGEST_LINE]):
                yield float(match[1])
